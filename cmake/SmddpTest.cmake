# smddp_add_test(<name> SOURCES a_test.cc … LIBS smddp_plan … [LABELS slow])
#
# One GoogleTest executable, registered with ctest under its own name. The timeout is a safety net: a
# test that waits has its own, much shorter deadline.
find_package(GTest REQUIRED)

function(smddp_add_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "smddp_add_test(${name}): expects SOURCES and LIBS, got ${ARGN}")
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp")
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gtest_main GTest::gmock)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 120 LABELS "${arg_LABELS}")
endfunction()
