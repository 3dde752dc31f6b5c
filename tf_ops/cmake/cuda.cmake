# hvd_ctr_cuda: the device code of cuda/*.cu, a static library without a framework.                             (HVD_CTR_CUDA)
#
# The CUDA runtime is linked statically and asks for the driver at its first call, so what links this library loads on machines
# that have neither GPU nor driver.
#
# HVD_CTR_CUDA_ARCHS      compute capabilities without the point, e.g. "90" or "80;90"; empty: all that this nvcc knows of those
#                         from Turing on (sm_75 .. sm_120; CUDA 12 also Volta, sm_70). For the newest of them PTX is kept too, so
#                         that GPUs that come later can run the code.
#
# What nvcc says about an object (registers, spills) is kept beside it, in <object>.log; launch/ptxas_report.py reads them.
set(HVD_CTR_CUDA_ARCHS "" CACHE STRING "Compute capabilities to compile for, e.g. 80;90; empty: all from Turing (CUDA 12: Volta) on")

# Before the language is enabled, which tries a compilation. The targets get theirs below.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80)
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)

set(cuda_archs "${HVD_CTR_CUDA_ARCHS}")
if(cuda_archs STREQUAL "")
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    set(cuda_archs 75 80 86 89 90 100 120)
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(cuda_archs 70 75 80 86 89 90 100 120)
  else()
    set(cuda_archs 70 75 80 86 89 90)
  endif()
endif()
set(cuda_newest 0)
set(cuda_targets "")
foreach(arch IN LISTS cuda_archs)
  if(NOT arch MATCHES "^[1-9][0-9]+$")
    message(FATAL_ERROR "HVD_CTR_CUDA_ARCHS is '${HVD_CTR_CUDA_ARCHS}', allowed: compute capabilities without the point, such as 80;90")
  endif()
  list(APPEND cuda_targets "${arch}-real")
  if(arch GREATER cuda_newest)
    set(cuda_newest ${arch})
  endif()
endforeach()
list(REMOVE_ITEM cuda_targets "${cuda_newest}-real")
list(APPEND cuda_targets "${cuda_newest}")
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}, compute capabilities ${cuda_archs}, PTX for ${cuda_newest}")

set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
file(GLOB cuda_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cu")
add_library(hvd_ctr_cuda STATIC ${cuda_sources})
set_target_properties(hvd_ctr_cuda PROPERTIES
  CUDA_ARCHITECTURES "${cuda_targets}"
  RULE_LAUNCH_COMPILE "bash ${CMAKE_CURRENT_LIST_DIR}/keep_log.sh <OBJECT>")
target_include_directories(hvd_ctr_cuda PUBLIC "${HVD_CTR_ROOT}")
# The same bits as on a CPU: no contraction, division and root rounded to nearest, denormals kept.
# Warnings of the compiler and of ptxas, which tells of spilled registers, are errors; not that nvcc 12.8 and 12.9 are the last ones
# for Volta, which they say with every file.
target_compile_options(hvd_ctr_cuda PRIVATE
  -fmad=false -prec-div=true -prec-sqrt=true -ftz=false
  "-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off,-fno-math-errno,-fno-trapping-math"
  -Wno-deprecated-gpu-targets -Werror=all-warnings "-Xptxas=-v,-warn-spills,-Werror")
