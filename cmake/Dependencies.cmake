# Third-party libraries, with one target name each, and smddp_config, which every layer inherits through
# smddp_common.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
if(FMT_INCLUDE_DIR)                                                 # headers without a package
  add_library(fmt::fmt-header-only INTERFACE IMPORTED)
  # Nothing else of that folder must be found: it may be that of some torch, whose headers would precede another torch's.
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/fmt_headers")
  file(CREATE_LINK "${FMT_INCLUDE_DIR}/fmt" "${PROJECT_BINARY_DIR}/fmt_headers/fmt" SYMBOLIC)
  target_include_directories(fmt::fmt-header-only SYSTEM INTERFACE "${PROJECT_BINARY_DIR}/fmt_headers")
  target_compile_definitions(fmt::fmt-header-only INTERFACE FMT_HEADER_ONLY=1)
else()
  find_package(fmt 9 REQUIRED)                                      # fmt::fmt, fmt::fmt-header-only
endif()
set(fmt fmt::fmt-header-only)
# A build with tests stays on the machine that has the library.
if(SMDDP_QUICK_BUILD AND SMDDP_BUILD_TESTS AND TARGET fmt::fmt)
  set(fmt fmt::fmt)
endif()

find_package(Libfabric 1.17)                                        # Libfabric::headers
if(Libfabric_FOUND)
  set(SMDDP_HAVE_LIBFABRIC 1)
  # Programs of this build load the copy that was found, not another copy of the system.
  get_filename_component(libfabric_folder "${Libfabric_LIBRARY}" DIRECTORY)
  if(NOT libfabric_folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
    list(APPEND CMAKE_BUILD_RPATH "${libfabric_folder}")
  endif()
  message(STATUS "smddp: libfabric ${Libfabric_VERSION}: ${Libfabric_LIBRARY}")
else()
  set(SMDDP_HAVE_LIBFABRIC 0)
  message(WARNING
    "libfabric >= 1.17 was not found: between nodes this build has TCP only. For EFA and other cards install "
    "libfabric-dev, or set LIBFABRIC_HOME to the folder that has include/ and lib/, and configure again.")
endif()

add_library(smddp_config INTERFACE)
target_include_directories(smddp_config INTERFACE "${PROJECT_SOURCE_DIR}/csrc")
target_link_libraries(smddp_config INTERFACE ${fmt} Threads::Threads)
target_compile_definitions(smddp_config INTERFACE
  SMDDP_HAVE_LIBFABRIC=${SMDDP_HAVE_LIBFABRIC} SMDDP_VERSION="${PROJECT_VERSION}")

if(SMDDP_WITH_TORCH)
  include(TorchOfPython)                                            # SMDDP_TORCHES, smddp_torch_<release>
endif()
