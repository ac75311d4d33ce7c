# Finds libfabric and defines Libfabric::headers. The library itself is loaded at run time, if it is needed.
#
# It searches LIBFABRIC_HOME (cache variable, then environment), then pkg-config, then the folder of the EFA
# installer. If LIBFABRIC_HOME is set but has no libfabric, that is an error, because the user asked for
# that copy.
if(NOT LIBFABRIC_HOME AND DEFINED ENV{LIBFABRIC_HOME})
  set(LIBFABRIC_HOME "$ENV{LIBFABRIC_HOME}")
endif()

function(smddp_find_libfabric_in prefix)
  find_path(Libfabric_INCLUDE_DIR rdma/fabric.h PATHS "${prefix}/include" NO_DEFAULT_PATH)
  find_library(Libfabric_LIBRARY fabric PATHS "${prefix}/lib" "${prefix}/lib64" NO_DEFAULT_PATH)
endfunction()

if(LIBFABRIC_HOME)
  smddp_find_libfabric_in("${LIBFABRIC_HOME}")
  if(NOT Libfabric_INCLUDE_DIR OR NOT Libfabric_LIBRARY)
    message(FATAL_ERROR "LIBFABRIC_HOME=${LIBFABRIC_HOME} has no include/rdma/fabric.h or no "
                        "lib/libfabric.so; point it at a libfabric installation, or unset it.")
  endif()
else()
  # With a version, so that an old system copy does not hide a newer one of the EFA installer.
  pkg_check_modules(PC_LIBFABRIC QUIET libfabric>=${Libfabric_FIND_VERSION})
  if(PC_LIBFABRIC_FOUND)
    find_path(Libfabric_INCLUDE_DIR rdma/fabric.h HINTS ${PC_LIBFABRIC_INCLUDEDIR})
    find_library(Libfabric_LIBRARY fabric HINTS ${PC_LIBFABRIC_LIBDIR})
  endif()
  smddp_find_libfabric_in("/opt/amazon/efa")
endif()

# The API version is read from the header, because the header is what the code is compiled with.
if(Libfabric_INCLUDE_DIR)
  file(STRINGS "${Libfabric_INCLUDE_DIR}/rdma/fabric.h" version_lines
       REGEX "#define FI_(MAJOR|MINOR)_VERSION")
  string(REGEX REPLACE ".*FI_MAJOR_VERSION ([0-9]+).*" "\\1" major "${version_lines}")
  string(REGEX REPLACE ".*FI_MINOR_VERSION ([0-9]+).*" "\\1" minor "${version_lines}")
  set(Libfabric_VERSION "${major}.${minor}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libfabric
  REQUIRED_VARS Libfabric_LIBRARY Libfabric_INCLUDE_DIR
  VERSION_VAR Libfabric_VERSION)

if(Libfabric_FOUND AND NOT TARGET Libfabric::headers)
  add_library(Libfabric::headers INTERFACE IMPORTED)
  set_target_properties(Libfabric::headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${Libfabric_INCLUDE_DIR}")
endif()
mark_as_advanced(Libfabric_INCLUDE_DIR Libfabric_LIBRARY)
