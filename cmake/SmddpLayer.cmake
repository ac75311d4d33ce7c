# smddp_add_layer(<layer> SOURCES a.cc … LIBS smddp_common …)
#
# The static library smddp_<layer>; a slash in the name becomes an underscore. A layer of headers alone is
# an interface library, so that those above it need not know.
function(smddp_add_layer layer)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  if(NOT arg_LIBS OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "smddp_add_layer(${layer}): expects SOURCES and LIBS, got ${ARGN}")
  endif()
  string(REPLACE "/" "_" target "smddp_${layer}")
  if(arg_SOURCES)
    add_library(${target} STATIC ${arg_SOURCES})
    target_link_libraries(${target} PUBLIC ${arg_LIBS})
  else()
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE ${arg_LIBS})
  endif()
endfunction()
