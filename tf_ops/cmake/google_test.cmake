# GoogleTest, from the first place that has it:
#   1. the system: an installed package (libgtest-dev), or Debian's sources in /usr/src/googletest
#   2. Debian's `googletest` package, downloaded and unpacked below the build folder, which needs no root
# Sets HVD_CTR_GTEST_FOUND; when nothing works, one line says why and the C++ tests are left out.
# HVD_CTR_NO_SYSTEM_GTEST=1 in the environment skips the first place.
#
# hvd_ctr_add_test(file) adds the test program of one tests/cpp/<stem>_test.cc and registers it with ctest.
set(HVD_CTR_GTEST_FOUND FALSE)
set(gtest_sources "")

if("$ENV{HVD_CTR_NO_SYSTEM_GTEST}")
  message(STATUS "GoogleTest of the system is not used: HVD_CTR_NO_SYSTEM_GTEST is set")
else()
  find_package(GTest QUIET)
  if(GTest_FOUND OR GTEST_FOUND)
    message(STATUS "GoogleTest: installed package")
    set(HVD_CTR_GTEST_FOUND TRUE)
  elseif(EXISTS /usr/src/googletest/CMakeLists.txt)
    set(gtest_sources /usr/src/googletest)
  endif()
endif()

if(NOT HVD_CTR_GTEST_FOUND AND NOT gtest_sources)
  execute_process(
    COMMAND bash "${CMAKE_CURRENT_LIST_DIR}/fetch_googletest.sh" "${CMAKE_BINARY_DIR}/googletest-package"
    OUTPUT_VARIABLE gtest_fetched ERROR_VARIABLE gtest_why RESULT_VARIABLE gtest_result
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(gtest_result EQUAL 0)
    set(gtest_sources "${gtest_fetched}")
  else()
    message(STATUS "C++ tests are left out: no GoogleTest on this system, and ${gtest_why}")
  endif()
endif()

if(gtest_sources)
  message(STATUS "GoogleTest: sources in ${gtest_sources}")
  set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
  set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
  set(CMAKE_WARN_DEPRECATED OFF CACHE BOOL "" FORCE)
  set(CMAKE_POLICY_VERSION_MINIMUM 3.5)  # Debian 11's GoogleTest asks for a CMake that newer ones refuse
  add_subdirectory("${gtest_sources}" googletest EXCLUDE_FROM_ALL)
  foreach(part gtest gtest_main)
    if(NOT TARGET GTest::${part})
      add_library(GTest::${part} ALIAS ${part})
    endif()
  endforeach()
  set(HVD_CTR_GTEST_FOUND TRUE)
endif()

# A data race or a use after free ends the program at once; leaks count as failures.
set(test_environment
  "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1"
  "UBSAN_OPTIONS=print_stacktrace=1"
  "TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1")

# ThreadSanitizer of GCC 12 cannot place its shadow memory when the kernel randomises more address bits than it knows of.
set(test_launcher "")
if(HVD_CTR_SANITIZE STREQUAL "thread")
  find_program(setarch_program setarch)
  if(setarch_program)
    set(test_launcher "${setarch_program}" -R)
  endif()
endif()

function(hvd_ctr_add_test test_source)
  get_filename_component(stem "${test_source}" NAME_WE)
  add_executable(${stem} "${test_source}")
  target_link_libraries(${stem} PRIVATE hvd_ctr_core GTest::gtest GTest::gtest_main)
  if(HVD_CTR_SANITIZE)
    # Optimizing the checks that sanitizers add to GoogleTest's macros takes most of the build; the core keeps its -O1.
    target_compile_options(${stem} PRIVATE -O0)
  endif()
  add_test(NAME ${stem} COMMAND ${test_launcher} $<TARGET_FILE:${stem}> --gtest_brief=1 WORKING_DIRECTORY "${CMAKE_BINARY_DIR}")
  set_tests_properties(${stem} PROPERTIES TIMEOUT 300 ENVIRONMENT "${test_environment}")
endfunction()
