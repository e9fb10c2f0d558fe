# What `cmake --install` copies: libraries, header, pkg-config file, CMake package and fqvit-run.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS ${FQVIT_LIBRARIES} EXPORT fqvit-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES include/fqvit.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(FQVIT_BUILD_TOOLS)
  install(TARGETS fqvit-run DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(FQVIT_PACKAGE ${CMAKE_INSTALL_LIBDIR}/cmake/fqvit)
install(EXPORT fqvit-targets NAMESPACE fqvit:: DESTINATION ${FQVIT_PACKAGE})
configure_package_config_file(cmake/fqvit-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/fqvit-config.cmake
  INSTALL_DESTINATION ${FQVIT_PACKAGE})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/fqvit-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/fqvit-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/fqvit-config-version.cmake
  DESTINATION ${FQVIT_PACKAGE})

# Relative to the file, so that the installed folder can be moved.
file(RELATIVE_PATH FQVIT_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(FQVIT_PC_LIBRARIES)
foreach(runtime ${FQVIT_CXX_RUNTIME})
  string(APPEND FQVIT_PC_LIBRARIES "-l${runtime} ")
endforeach()
configure_file(cmake/fqvit.pc.in ${CMAKE_CURRENT_BINARY_DIR}/fqvit.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/fqvit.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
