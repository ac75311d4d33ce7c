# smddp_add_test(<name> SOURCES a_test.cc … LIBS smddp_plan … [LABELS slow sequential])
#
# slow         `make test-fast` leaves it out
# sequential   has one thread, so ThreadSanitizer cannot find anything
# optimized    does less under sanitizers, or nothing. So `make test` runs it without them, too
#
# One GoogleTest executable, registered with ctest under its own name. The timeout is a safety net: a
# test that waits has its own, much shorter deadline. Sanitizers slow everything down several times.
find_package(GTest REQUIRED)
if(SMDDP_QUICK_BUILD)
  # What takes time in a test, and what sanitizers watch, is in the layers. Compiling the tests themselves is quicker so.
  set(SMDDP_TEST_OPTIONS -O1)
  if(SMDDP_SANITIZE MATCHES "undefined")
    list(APPEND SMDDP_TEST_OPTIONS -fno-sanitize=undefined)
  endif()
  if(SMDDP_FUZZ)
    list(APPEND SMDDP_TEST_OPTIONS -fno-sanitize=fuzzer-no-link)
  endif()
  # An executable, since its flags are not those of a library.
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/test_headers.cc" CONTENT "int main() {}\n")
  add_executable(test_headers EXCLUDE_FROM_ALL "${PROJECT_BINARY_DIR}/test_headers.cc")
  target_link_libraries(test_headers PRIVATE smddp_config GTest::gtest_main GTest::gmock)
  target_compile_options(test_headers PRIVATE ${SMDDP_TEST_OPTIONS})
  target_precompile_headers(test_headers PRIVATE
    <algorithm> <array> <atomic> <chrono> <cstring> <functional> <map> <memory> <mutex> <optional> <random> <span>
    <string> <thread> <vector> <fmt/format.h> <gmock/gmock.h> <gtest/gtest.h>)
endif()
# All tests that are not sequential, and all that are optimized.
add_custom_target(threaded_tests)
add_custom_target(optimized_tests)
if(SMDDP_SANITIZE)
  set(SMDDP_TEST_TIMEOUT 600)
else()
  set(SMDDP_TEST_TIMEOUT 300)
endif()

# Applies to a target what all targets with tests have.
function(smddp_prepare_tests target)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp")
  target_link_libraries(${target} PRIVATE ${ARGN} GTest::gtest_main GTest::gmock)
  if(SMDDP_QUICK_BUILD)
    target_compile_options(${target} PRIVATE ${SMDDP_TEST_OPTIONS})
    target_precompile_headers(${target} REUSE_FROM test_headers)
  endif()
endfunction()

# Tests that several executables have: smddp_add_test(… SOURCES $<TARGET_OBJECTS:<name>> …).
function(smddp_add_test_objects name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_library(${name} OBJECT ${arg_SOURCES})
  # As executables are compiled, or their precompiled headers would not fit.
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE -fPIE)
  smddp_prepare_tests(${name} ${arg_LIBS})
endfunction()

function(smddp_add_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "smddp_add_test(${name}): expects SOURCES and LIBS, got ${ARGN}")
  endif()
  add_executable(${name} ${arg_SOURCES})
  smddp_prepare_tests(${name} ${arg_LIBS})
  if(NOT "sequential" IN_LIST arg_LABELS)
    add_dependencies(threaded_tests ${name})
  endif()
  if("optimized" IN_LIST arg_LABELS)
    add_dependencies(optimized_tests ${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT ${SMDDP_TEST_TIMEOUT} LABELS "${arg_LABELS}"
    ENVIRONMENT "UBSAN_OPTIONS=print_stacktrace=1;TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp:print_suppressions=0:second_deadlock_stack=1;IPATH_NO_BACKTRACE=1;HFI_NO_BACKTRACE=1;LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/lsan.supp:print_suppressions=0")
endfunction()
