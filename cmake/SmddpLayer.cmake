# smddp_add_layer(<layer> SOURCES a.cc … LIBS smddp_common … [HEADERS <vector> …])
#
# Adds the static library smddp_<layer>; a slash in the name becomes an underscore. A layer that has only
# headers is an interface library, so other layers can link to it in the same way. HEADERS are headers that
# most files of the layer include (default: those of smddp_common). Only a quick build precompiles them, so
# any other build checks whether each file includes what it uses.
function(smddp_add_layer layer)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS;HEADERS" ${ARGN})
  if(NOT arg_LIBS OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "smddp_add_layer(${layer}): expects SOURCES and LIBS, got ${ARGN}")
  endif()
  string(REPLACE "/" "_" target "smddp_${layer}")
  if(arg_SOURCES)
    add_library(${target} STATIC ${arg_SOURCES})
    target_link_libraries(${target} PUBLIC ${arg_LIBS})
    if(arg_HEADERS)
      target_precompile_headers(${target} PRIVATE ${arg_HEADERS})
    else()
      target_precompile_headers(${target} REUSE_FROM smddp_common)
    endif()
  else()
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE ${arg_LIBS})
  endif()
endfunction()
