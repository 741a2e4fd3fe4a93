# One library per folder of src/. Sources are listed by pattern; unit tests (x_test.cc) sit beside
# the code and become one test binary per folder.

find_program(NIBBLE_CCACHE ccache)
if(NIBBLE_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${NIBBLE_CCACHE})
endif()

add_library(nibble_options INTERFACE)
target_include_directories(nibble_options INTERFACE ${CMAKE_SOURCE_DIR}/src)
# Floating-point results must not depend on the compiler fusing operations (see docs/architecture.md).
target_compile_options(nibble_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-missing-field-initializers;-ffp-contract=off;-fno-math-errno>")
if(NIBBLE_DEVELOPER)
  target_compile_options(nibble_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(NIBBLE_SANITIZE)
  target_compile_options(nibble_options INTERFACE -fsanitize=${NIBBLE_SANITIZE}
    -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(nibble_options INTERFACE -fsanitize=${NIBBLE_SANITIZE})
  # gcc's manual: with sanitizers -Wmaybe-uninitialized has false positives (std::variant here).
  target_compile_options(nibble_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()
if(NIBBLE_FUZZ)
  target_compile_options(nibble_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# Of sources that are compiled for one instruction set. -O3 for full unrolling of the small loops over
# registers; some of GCC 12's own intrinsics read vectors that they leave uninitialised on purpose.
set(NIBBLE_KERNEL_FLAGS -O3 -Wno-maybe-uninitialized -Wno-uninitialized)
set(NIBBLE_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(NIBBLE_AVX512_FLAGS ${NIBBLE_AVX2_FLAGS} -mavx512f -mavx512bw -mavx512vl -mavx512dq)

if(NIBBLE_DEVELOPER)
  enable_testing()
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()

# nibble_folder(<name> [DEPS <targets>...]): library nibble_<name> from src/<name>/**.cc, and its tests.
function(nibble_folder name)
  cmake_parse_arguments(ARG "" "" "DEPS;TEST_DEPS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  # Libraries of their own.
  list(FILTER sources EXCLUDE REGEX "/backend/(cuda/|cpu/kernels/|cpu/amx/)")
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  add_library(nibble_${name} STATIC ${sources})
  target_link_libraries(nibble_${name} PUBLIC nibble_options ${ARG_DEPS})
  # libnibble_cuda.so has these. With one setting for all presets their objects come from ccache.
  if(name MATCHES "^(base|core|quant|ops|backend)$")
    set_target_properties(nibble_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  endif()
  if(NIBBLE_DEVELOPER AND tests)
    nibble_test(${name}_test SOURCES ${tests} DEPS nibble_${name} ${ARG_TEST_DEPS})
  endif()
endfunction()

# nibble_test(<name> SOURCES ... DEPS ...): a gtest binary whose cases ctest lists one by one.
# Tests run in the source root, so that relative paths to tests/ and models/ resolve.
function(nibble_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  gtest_discover_tests(${name} NO_PRETTY_VALUES
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 300 PROPERTIES TIMEOUT 900)
endfunction()

# nibble_page(<folder> <page.html> <constant>): a web page becomes a header with a constant of this
# name, beside the folder's objects, so that the program needs no file beside it. All pages share
# the style and tools of src/quantizer/report.
function(nibble_page folder page constant)
  set(shared ${CMAKE_SOURCE_DIR}/src/quantizer/report)
  file(READ ${CMAKE_CURRENT_SOURCE_DIR}/${page} text)
  file(READ ${shared}/report_style.css style)
  file(READ ${shared}/report_tools.js tools)
  string(REPLACE "@STYLE@" "${style}" text "${text}")
  string(REPLACE "@TOOLS@" "${tools}" text "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${page}
    ${shared}/report_style.css ${shared}/report_tools.js)
  get_filename_component(name ${page} NAME_WE)
  file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}.h CONTENT
    "#pragma once\nnamespace nibble {\ninline constexpr char ${constant}[] = R\"page(${text})page\";\n}  // namespace nibble\n")
  target_include_directories(nibble_${folder} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
endfunction()
