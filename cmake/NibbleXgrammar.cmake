# xgrammar: masks of the tokens that a grammar allows. Its sources lie packed in third_party/xgrammar
# and are built from the build folder; only src/text/grammar/grammar.cc includes it.
set(version 0.2.8)
set(sha256 ec64ee681ee6b61c739b3becfba53e05bb8090741e077cf0f9d2bca6fa83aed5)
set(archive ${CMAKE_SOURCE_DIR}/third_party/xgrammar/xgrammar-${version}.tar.xz)
set(root ${CMAKE_BINARY_DIR}/third_party/xgrammar-${version})
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${archive})

if(NOT EXISTS ${root}/${sha256})
  file(SHA256 ${archive} found)
  if(NOT found STREQUAL sha256)
    message(FATAL_ERROR "${archive} has the SHA-256 ${found}, but ${sha256} was expected; "
      "take the file from the repository again")
  endif()
  file(REMOVE_RECURSE ${root})
  file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${CMAKE_BINARY_DIR}/third_party)
  file(TOUCH ${root}/${sha256})
endif()

file(GLOB_RECURSE sources ${root}/cpp/*.cc)
add_library(xgrammar STATIC EXCLUDE_FROM_ALL ${sources})
set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17 EXPORT_COMPILE_COMMANDS OFF
  CXX_CLANG_TIDY "")
target_include_directories(xgrammar SYSTEM PUBLIC ${root}/include ${root}/3rdparty/picojson
  ${root}/3rdparty/dlpack/include)
target_compile_definitions(xgrammar PUBLIC XGRAMMAR_ENABLE_CPPTRACE=0
  XGRAMMAR_ENABLE_INTERNAL_CHECK=0 XGRAMMAR_LOG_CUSTOMIZE=1)
target_compile_options(xgrammar PRIVATE -w)
if(NIBBLE_SANITIZE)
  target_compile_options(xgrammar PRIVATE -fsanitize=${NIBBLE_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
endif()
if(NIBBLE_FUZZ)
  target_compile_options(xgrammar PRIVATE -fsanitize=fuzzer-no-link)
endif()
target_link_libraries(xgrammar PUBLIC Threads::Threads)
