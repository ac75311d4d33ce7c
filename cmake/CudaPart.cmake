# smddp_cuda_part: libsmddp_cuda.so from csrc/cuda/kernels, if nvcc is available.
#
# This file calls nvcc itself and does not enable the language CUDA of CMake, which would pass the warnings of g++ to
# nvcc and test the host compiler again. The library contains CUDA's run time, does not use torch, and lies beside the
# modules.
set(SMDDP_CUDA AUTO CACHE STRING "Compile the CUDA part: ON, OFF, or AUTO, where nvcc and a torch with CUDA are there")
set_property(CACHE SMDDP_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SMDDP_HAVE_CUDA_PART OFF)
set(folder "${SMDDP_MODULE_FOLDER}")
if(SMDDP_CUDA STREQUAL OFF OR (SMDDP_CUDA STREQUAL AUTO AND NOT SMDDP_TORCH_CUDA))
  # Otherwise the module would load the library of an earlier configuration.
  file(REMOVE "${folder}/libsmddp_cuda.so")
endif()
if(SMDDP_CUDA STREQUAL OFF)
  return()
endif()
if(SMDDP_CUDA STREQUAL AUTO AND NOT SMDDP_TORCH_CUDA)
  message(STATUS "smddp: this torch has no CUDA: the CUDA part is left out")
  return()
endif()

find_program(SMDDP_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT SMDDP_NVCC)
  if(SMDDP_CUDA STREQUAL AUTO)
    file(REMOVE "${folder}/libsmddp_cuda.so")
    message(STATUS "smddp: nvcc was not found: the CUDA part is left out, and ranks that share a GPU go through "
                   "the host. Set CUDA_HOME and configure again.")
    return()
  endif()
  message(FATAL_ERROR "SMDDP_CUDA=ON: nvcc was not found; set CUDA_HOME to the folder that has bin/nvcc")
endif()

# Architectures in the notation of torch's extensions: "8.0;9.0+PTX", separated by semicolons or blanks.
set(architectures "$ENV{TORCH_CUDA_ARCH_LIST}")
if(NOT architectures)
  set(architectures "8.0;9.0+PTX")
endif()
string(REGEX REPLACE "[ ,]+" ";" architectures "${architectures}")
set(flags)
foreach(architecture IN LISTS architectures)
  if(NOT architecture MATCHES "^([0-9]+)\\.([0-9]+[a-z]?)(\\+PTX)?$")
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: \"${architecture}\" is not of the form 9.0 or 9.0+PTX")
  endif()
  set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
  set(codes "sm_${number}")
  if(CMAKE_MATCH_3)
    set(codes "[sm_${number},compute_${number}]")
  endif()
  list(APPEND flags -gencode "arch=compute_${number},code=${codes}")
endforeach()

# No fused multiply-add, so that sums equal those of the CPU bit by bit (csrc/cuda/kernels/arithmetic.h).
list(APPEND flags -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr
  "-I${PROJECT_SOURCE_DIR}/csrc" "-DSMDDP_VERSION=\"${PROJECT_VERSION}\""
  -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra)
if(SMDDP_WARNINGS_AS_ERRORS)
  list(APPEND flags -Werror all-warnings)
endif()

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/cuda/kernels/*.cu")
set(objects)
foreach(source IN LISTS sources)
  get_filename_component(name "${source}" NAME_WE)
  set(object "${PROJECT_BINARY_DIR}/csrc/cuda/kernels/${name}.o")
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/csrc/cuda/kernels")
  add_custom_command(OUTPUT "${object}" DEPENDS "${source}" DEPFILE "${object}.d"
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} "${SMDDP_NVCC}" ${flags} -MD -MF "${object}.d" -c "${source}" -o "${object}"
    COMMENT "nvcc ${name}.cu" VERBATIM)
  list(APPEND objects "${object}")
endforeach()
add_custom_command(OUTPUT "${folder}/libsmddp_cuda.so" DEPENDS ${objects}
  COMMAND "${CMAKE_COMMAND}" -E make_directory "${folder}"
  COMMAND "${SMDDP_NVCC}" -shared -cudart static -o "${folder}/libsmddp_cuda.so" ${objects}
  COMMENT "nvcc libsmddp_cuda.so" VERBATIM)
add_custom_target(smddp_cuda_part ALL DEPENDS "${folder}/libsmddp_cuda.so")
install(FILES "${folder}/libsmddp_cuda.so" DESTINATION smddp/lib COMPONENT module)
set(SMDDP_HAVE_CUDA_PART ON)
message(STATUS "smddp: CUDA part by ${SMDDP_NVCC} for ${architectures}")
