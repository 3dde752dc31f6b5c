// HVD_CTR_REGISTER_KERNEL: one line registers a kernel class for CPUs and, where the library has them, for GPUs.
//
//   HVD_CTR_REGISTER_KERNEL("HvdCtrLookup", LookupOp, "handle", "ticket", "send_splits");     // rows are in the device's memory
//
// The names after the class are the inputs and outputs that are in host memory on a GPU too; all others are in its memory. A test
// compares them with the definitions of the ops. Every op has both kernels, also one that never touches a row: it must run
// wherever a user, or TensorFlow, has placed it.
#ifndef HVD_CTR_GLUE_KERNEL_REGISTRATION_H_
#define HVD_CTR_GLUE_KERNEL_REGISTRATION_H_

#include <initializer_list>

#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/glue/device_memory.h"

namespace hvd_ctr {

template <typename Kernel>
bool RegisterKernel(const char* op, const char* class_name, std::initializer_list<const char*> host_arguments) {
  using tensorflow::KernelDefBuilder;
  using tensorflow::kernel_factory::OpKernelRegistrar;
  tensorflow::OpKernel* (*const make)(tensorflow::OpKernelConstruction*) =
      [](tensorflow::OpKernelConstruction* c) -> tensorflow::OpKernel* { return new Kernel(c); };
  OpKernelRegistrar(KernelDefBuilder(op).Device(tensorflow::DEVICE_CPU).Build(), class_name, make);
  if (!HasGpuKernels()) return true;
  KernelDefBuilder on_gpu(op);
  on_gpu.Device(tensorflow::DEVICE_GPU);
  for (const char* argument : host_arguments) on_gpu.HostMemory(argument);
  OpKernelRegistrar(on_gpu.Build(), class_name, make);
  return true;
}

}  // namespace hvd_ctr

#define HVD_CTR_REGISTER_KERNEL(op, Kernel, ...) \
  [[maybe_unused]] const bool registered_##Kernel = RegisterKernel<Kernel>(op, #Kernel, {__VA_ARGS__})

#endif  // HVD_CTR_GLUE_KERNEL_REGISTRATION_H_
