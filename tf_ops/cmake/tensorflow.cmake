# hvd_ctr_tensorflow: include folder, flags and library of the TensorFlow that HVD_CTR_PYTHON imports.
#
# Importing TensorFlow takes seconds, so the answer is cached and asked again only when its place or version changes.
if(NOT HVD_CTR_PYTHON)
  find_program(hvd_ctr_python3 python3 REQUIRED)
  set(HVD_CTR_PYTHON "${hvd_ctr_python3}" CACHE FILEPATH "" FORCE)
endif()

execute_process(
  COMMAND "${HVD_CTR_PYTHON}" -c [=[
from importlib import metadata
for name in ("tensorflow-cpu", "tensorflow"):
    try:
        found = metadata.distribution(name)
        print(name, found.version, "in", found.locate_file(""), end="")
        break
    except metadata.PackageNotFoundError:
        pass
]=]
  OUTPUT_VARIABLE tf_distribution ERROR_VARIABLE tf_error RESULT_VARIABLE tf_result)
if(NOT tf_result EQUAL 0 OR tf_distribution STREQUAL "")
  message(FATAL_ERROR "${HVD_CTR_PYTHON} has no TensorFlow; run ./launch/setup.sh or pass -DHVD_CTR_PYTHON=<python with TensorFlow> ${tf_error}")
endif()

if(NOT tf_distribution STREQUAL "${HVD_CTR_TF_KEY}")
  message(STATUS "Asking ${tf_distribution} for its build flags")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env TF_CPP_MIN_LOG_LEVEL=3 "${HVD_CTR_PYTHON}" -c [=[
import tensorflow as tf
print(tf.__version__, " ".join(tf.sysconfig.get_compile_flags()), " ".join(tf.sysconfig.get_link_flags()), sep=";", end="")
]=]
    OUTPUT_VARIABLE tf_answer ERROR_VARIABLE tf_error RESULT_VARIABLE tf_result)
  if(NOT tf_result EQUAL 0)
    message(FATAL_ERROR "${HVD_CTR_PYTHON} cannot import TensorFlow:\n${tf_error}")
  endif()
  list(GET tf_answer 0 tf_version)
  list(GET tf_answer 1 tf_compile)
  list(GET tf_answer 2 tf_link)
  set(HVD_CTR_TF_VERSION "${tf_version}" CACHE INTERNAL "")
  set(HVD_CTR_TF_COMPILE "${tf_compile}" CACHE INTERNAL "")
  set(HVD_CTR_TF_LINK "${tf_link}" CACHE INTERNAL "")
  set(HVD_CTR_TF_KEY "${tf_distribution}" CACHE INTERNAL "")
endif()
message(STATUS "TensorFlow ${HVD_CTR_TF_VERSION} of ${HVD_CTR_PYTHON}")

add_library(hvd_ctr_tensorflow INTERFACE)
separate_arguments(tf_flags UNIX_COMMAND "${HVD_CTR_TF_COMPILE}")
foreach(flag IN LISTS tf_flags)
  if(flag MATCHES "^-I(.*)$")
    # SYSTEM: TensorFlow's headers do not pass -Wall -Wextra -Werror.
    target_include_directories(hvd_ctr_tensorflow SYSTEM INTERFACE "${CMAKE_MATCH_1}")
  elseif(NOT flag MATCHES "^-+std=")
    target_compile_options(hvd_ctr_tensorflow INTERFACE "${flag}")
  endif()
endforeach()
separate_arguments(tf_libraries UNIX_COMMAND "${HVD_CTR_TF_LINK}")
# As libraries, not as link options: those would come before the object files, and a linker that links --as-needed would then
# leave libtensorflow_framework out. It is loaded already when the ops are, so no rpath leads to it.
target_link_libraries(hvd_ctr_tensorflow INTERFACE ${tf_libraries})
