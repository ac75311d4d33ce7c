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
  if(SMDDP_SANITIZE MATCHES "thread")
    # g++ warns that TSan does not model std::atomic_thread_fence; our code pairs fences with atomics.
    add_compile_options(-Wno-tsan)
  endif()
  message(STATUS "smddp: sanitizers: ${SMDDP_SANITIZE}")
endif()

# The fuzzer needs the coverage of the whole core, not only of its entry point.
if(SMDDP_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "SMDDP_FUZZ needs clang: configure with -DCMAKE_CXX_COMPILER=clang++")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
