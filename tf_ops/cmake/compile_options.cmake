# hvd_ctr_options: the flags that every target of this project is compiled and linked with.
add_library(hvd_ctr_options INTERFACE)

# -ffp-contract=off: a fused multiply-add rounds once where mul and add round twice. Without it the same row would train
# differently on processors that have FMA and on those that do not, and differently from the NumPy reference.
# -fno-math-errno -fno-trapping-math: they change no result, but without them GCC calls sqrt element by element to set errno, which
# makes Adagrad four times slower.
target_compile_options(hvd_ctr_options INTERFACE -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -fno-trapping-math)

if(HVD_CTR_MARCH)
  target_compile_options(hvd_ctr_options INTERFACE "-march=${HVD_CTR_MARCH}")
endif()

# Both build types: the checks in the core are Status returns, not assert(), so nothing hangs on NDEBUG.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

if(HVD_CTR_SANITIZE STREQUAL "")
  return()
elseif(HVD_CTR_SANITIZE STREQUAL "address")
  set(sanitizers "address,undefined")
elseif(HVD_CTR_SANITIZE STREQUAL "thread")
  set(sanitizers "thread")
else()
  message(FATAL_ERROR "HVD_CTR_SANITIZE is '${HVD_CTR_SANITIZE}', allowed: address, thread or empty")
endif()

# -g1: the lines of a report's stack, which is all that it shows. With -g a third of the compile time goes into variables.
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g1")
target_compile_options(hvd_ctr_options INTERFACE
  "-fsanitize=${sanitizers}" -fno-sanitize-recover=all -fno-omit-frame-pointer)
target_link_options(hvd_ctr_options INTERFACE "-fsanitize=${sanitizers}")
