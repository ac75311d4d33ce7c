# smddp_add_layer(<layer> SOURCES a.cc … LIBS smddp_common … [HEADERS <vector> …] [EACH_ALONE])
#
# Adds the static library smddp_<layer>; a slash in the name becomes an underscore. A layer that has only
# headers is an interface library, so other layers can link to it in the same way. HEADERS are headers that
# most files of the layer include (default: those of smddp_common). Only a quick build precompiles them, so
# any other build checks whether each file includes what it uses. A quick build also compiles the files of a layer in
# groups, but for a layer with EACH_ALONE.
function(smddp_add_layer layer)
  cmake_parse_arguments(arg "EACH_ALONE" "" "SOURCES;LIBS;HEADERS" ${ARGN})
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
    if(NOT arg_EACH_ALONE)
      smddp_compile_in_groups(${target})
    endif()
  else()
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE ${arg_LIBS})
  endif()
endfunction()

# Lets a quick build compile the files of a target in groups of six: templates that they share are then compiled once.
# With torch's headers those cost each compilation 5 s of processor time, precompiled or not. The groups start with the
# same files everywhere, and a change compiles one group.
function(smddp_compile_in_groups target)
  if(SMDDP_QUICK_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  endif()
endfunction()
