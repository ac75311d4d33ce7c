# smddp_add_layer(<layer> SOURCES a.cc … LIBS smddp_common … [HEADERS <vector> …])
#
# The static library smddp_<layer>; a slash in the name becomes an underscore. A layer of headers alone is
# an interface library, so that those above it need not know. HEADERS are what most files of the layer
# include; without, those of smddp_common. They are precompiled in a quick build only, so that another one
# shows whether each file includes what it uses.
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
