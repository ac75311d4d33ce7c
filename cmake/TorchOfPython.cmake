# SMDDP_TORCHES, the releases of torch that modules are built for, such as "2.11;2.15": those in the folders
# SMDDP_TORCH_FOLDERS, or the one that PYTHON_EXECUTABLE imports. For each, smddp_torch_<release> has its headers and
# libraries.
#
# find_package(Torch) is not used: with a CUDA wheel it requires the whole CUDA toolkit, although this module
# has no CUDA code. pybind11 is torch's copy, because another copy would not know the types that torch registers.
execute_process(
  COMMAND "${PYTHON_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/torch_facts.py" ${SMDDP_TORCH_FOLDERS}
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_VARIABLE torch_error ERROR_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE torch_status)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "${torch_error}")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(POP_FRONT torch_facts SMDDP_MODULE_SUFFIX python_include_dir)

set(SMDDP_TORCHES "")
set(SMDDP_TORCH_CUDA "")                                            # of any of them
foreach(facts IN LISTS torch_facts)
  string(REPLACE "|" ";" facts "${facts}")
  list(GET facts 0 version)
  list(GET facts 1 home)
  list(GET facts 2 cuda)
  string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" release "${version}")
  if(release IN_LIST SMDDP_TORCHES)
    message(FATAL_ERROR "SMDDP_TORCH_FOLDERS has torch ${release} twice")
  endif()
  list(APPEND SMDDP_TORCHES "${release}")
  if(NOT cuda STREQUAL "none")
    set(SMDDP_TORCH_CUDA "${cuda}")
  endif()
  message(STATUS "smddp: torch ${version} in ${home}")

  set(target smddp_torch_${release})
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE
    "${home}/include" "${home}/include/torch/csrc/api/include" "${python_include_dir}")
  target_compile_definitions(${target} INTERFACE
    SMDDP_TORCH_VERSION="${version}"
    SMDDP_TORCH_VERSION_MAJOR=${CMAKE_MATCH_1}
    SMDDP_TORCH_VERSION_MINOR=${CMAKE_MATCH_2}
    USE_DISTRIBUTED USE_C10D_GLOO)
  # Files that include torch's headers also find torch's copy of fmt, whose library torch does not export.
  target_compile_definitions(${target} INTERFACE FMT_HEADER_ONLY=1)
  target_compile_options(${target} INTERFACE -UFMT_SHARED)
  foreach(name IN ITEMS c10 torch_cpu torch torch_python)
    target_link_libraries(${target} INTERFACE "${home}/lib/lib${name}.so")
  endforeach()
endforeach()
