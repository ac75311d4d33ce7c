# libsmddp.so: all layers that do not know torch. The modules for the releases of torch share it.
#
# It exports what is in the namespace smddp, and the C interface (smddp_...), and nothing of the libraries that it contains.
add_library(smddp_core SHARED)
foreach(layer IN LISTS SMDDP_LAYERS)
  target_sources(smddp_core PRIVATE $<TARGET_OBJECTS:smddp_${layer}>)
endforeach()
set(exports "${PROJECT_SOURCE_DIR}/cmake/exports.map")
target_link_libraries(smddp_core PUBLIC smddp_config PRIVATE ${CMAKE_DL_LIBS})
target_link_options(smddp_core PRIVATE "-Wl,--version-script=${exports}" -Wl,--no-undefined -Wl,-Bsymbolic)
set_target_properties(smddp_core PROPERTIES
  OUTPUT_NAME smddp LINKER_LANGUAGE CXX LINK_DEPENDS "${exports}" LIBRARY_OUTPUT_DIRECTORY "${SMDDP_MODULE_FOLDER}")
install(TARGETS smddp_core LIBRARY DESTINATION smddp/lib COMPONENT module)
