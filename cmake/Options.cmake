# All options of the build, and the flags of all targets.

set(PYTHON_EXECUTABLE "" CACHE FILEPATH "Python interpreter that the module is built for")
if(PYTHON_EXECUTABLE)
  set(SMDDP_TORCH_DEFAULT ON)
else()
  set(SMDDP_TORCH_DEFAULT OFF)
endif()

set(SMDDP_TORCH_FOLDERS "" CACHE STRING
  "Folders that contain torch, one for each release to build for; default: the one that PYTHON_EXECUTABLE imports")
option(SMDDP_WITH_TORCH "Build process_group and the module smddp.torch._C" ${SMDDP_TORCH_DEFAULT})
option(SMDDP_BUILD_TESTS "Build the C++ tests (needs GoogleTest)" ON)
option(SMDDP_WARNINGS_AS_ERRORS "Treat compiler warnings as errors" ON)
option(SMDDP_QUICK_BUILD "Compile in half the time: precompiled headers, and files in groups" OFF)
set(FMT_INCLUDE_DIR "" CACHE PATH "Folder with fmt/format.h; default: the package fmt that CMake finds")
set(SMDDP_SANITIZE "" CACHE STRING "address, undefined, thread or empty; join two by a comma")
set_property(CACHE SMDDP_SANITIZE PROPERTY STRINGS "" address undefined thread address,undefined)

if(SMDDP_WITH_TORCH AND NOT PYTHON_EXECUTABLE)
  message(FATAL_ERROR "SMDDP_WITH_TORCH needs -DPYTHON_EXECUTABLE=<a Python, with torch or with -DSMDDP_TORCH_FOLDERS=…>")
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo or Debug" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# CMake's RelWithDebInfo uses -O2 only. It does not define NDEBUG here, because developers and CI use it.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -g1")

# A fused multiply-add rounds once; a multiply and an add round twice. If the compiler could choose, sums
# would differ between instruction sets, and so between hosts.
add_compile_options(-Wall -Wextra -ffp-contract=off)
if(NOT SMDDP_QUICK_BUILD)
  set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")                         # ccache needs either
  add_compile_options(-fpch-preprocess)
else()
  add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
endif()
if(SMDDP_WARNINGS_AS_ERRORS)
  add_compile_options(-Werror)
endif()
if(SMDDP_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug")
  # Functions for the engine's owner alone check who calls them (common/ownership.h).
  add_compile_definitions(SMDDP_CHECK_OWNERSHIP=1)
endif()
