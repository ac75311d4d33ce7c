# Applies SMDDP_SANITIZE to all targets. Frame pointers make reports readable. The first finding ends the
# test, because nobody reads the output of a test that passes.
if(SMDDP_SANITIZE)
  if(SMDDP_SANITIZE MATCHES "thread" AND SMDDP_SANITIZE MATCHES "address")
    message(FATAL_ERROR "SMDDP_SANITIZE: thread and address cannot be combined")
  endif()
  if(SMDDP_WITH_TORCH)
    message(FATAL_ERROR "SMDDP_SANITIZE covers the core only: torch itself is not instrumented. "
                        "Configure without PYTHON_EXECUTABLE.")
  endif()
  add_compile_options(-fsanitize=${SMDDP_SANITIZE} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer -O1 -g1)
  add_link_options(-fsanitize=${SMDDP_SANITIZE})
  if(SMDDP_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ warns that TSan does not model std::atomic_thread_fence; our code pairs fences with atomics.
    add_compile_options(-Wno-tsan)
  endif()
  # For tests; g++ and clang have different names for it.
  string(REPLACE "," ";" sanitizers "${SMDDP_SANITIZE}")
  foreach(sanitizer IN LISTS sanitizers)
    string(TOUPPER "${sanitizer}" sanitizer)
    add_compile_definitions(SMDDP_SANITIZE_${sanitizer})
  endforeach()
  message(STATUS "smddp: sanitizers: ${SMDDP_SANITIZE}")
endif()

# Fuzzers are built where there is AddressSanitizer of clang. They need the coverage of the whole core, not only of their
# entry points.
set(SMDDP_FUZZ OFF)
if(SMDDP_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(SMDDP_FUZZ ON)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
