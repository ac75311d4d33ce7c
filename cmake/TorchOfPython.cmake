# smddp_torch: headers and libraries of the torch that PYTHON_EXECUTABLE imports.
#
# find_package(Torch) is not used: with a CUDA wheel it requires the whole CUDA toolkit, although this module
# has no CUDA code. pybind11 is torch's copy, because another copy would not know the types that torch registers.
execute_process(
  COMMAND "${PYTHON_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/torch_facts.py"
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_VARIABLE torch_error ERROR_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE torch_status)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "${torch_error}")
endif()
# Five lines: version, module suffix, include folders and library folders joined by |, version of CUDA or none.
string(REPLACE "\n" "\n;" torch_facts "${torch_facts}")
foreach(name IN ITEMS SMDDP_TORCH_VERSION SMDDP_MODULE_SUFFIX torch_include_dirs torch_library_dirs SMDDP_TORCH_CUDA)
  list(POP_FRONT torch_facts line)
  string(STRIP "${line}" line)
  string(REPLACE "|" ";" ${name} "${line}")
endforeach()
if(SMDDP_TORCH_CUDA STREQUAL "none")
  set(SMDDP_TORCH_CUDA "")
endif()
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" torch_release "${SMDDP_TORCH_VERSION}")
set(SMDDP_TORCH_VERSION_MAJOR ${CMAKE_MATCH_1})
set(SMDDP_TORCH_VERSION_MINOR ${CMAKE_MATCH_2})
message(STATUS "smddp: torch ${SMDDP_TORCH_VERSION} of ${PYTHON_EXECUTABLE}")

add_library(smddp_torch INTERFACE)
target_include_directories(smddp_torch SYSTEM INTERFACE ${torch_include_dirs})
target_compile_definitions(smddp_torch INTERFACE
  SMDDP_TORCH_VERSION="${SMDDP_TORCH_VERSION}"
  SMDDP_TORCH_VERSION_MAJOR=${SMDDP_TORCH_VERSION_MAJOR}
  SMDDP_TORCH_VERSION_MINOR=${SMDDP_TORCH_VERSION_MINOR}
  USE_DISTRIBUTED USE_C10D_GLOO)
# Files that include torch's headers also find torch's copy of fmt, whose library torch does not export.
target_compile_definitions(smddp_torch INTERFACE FMT_HEADER_ONLY=1)
target_compile_options(smddp_torch INTERFACE -UFMT_SHARED)
foreach(name IN ITEMS c10 torch_cpu torch torch_python)
  find_library(smddp_lib_${name} ${name} PATHS ${torch_library_dirs} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(smddp_torch INTERFACE "${smddp_lib_${name}}")
endforeach()
