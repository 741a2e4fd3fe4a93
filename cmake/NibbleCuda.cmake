# The CUDA language. CMake 3.25.1 passes no flag for CUDA C++20, hence the option by hand; CUDA's
# compiler is looked for beside the toolkit's usual place, since it is seldom on the path.
find_program(NIBBLE_NVCC nvcc HINTS /usr/local/cuda/bin REQUIRED)
set(CMAKE_CUDA_COMPILER ${NIBBLE_NVCC})
set(CMAKE_CUDA_ARCHITECTURES ${NIBBLE_CUDA_ARCHITECTURES})
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=gnu++20")
find_program(NIBBLE_CCACHE ccache)
if(NIBBLE_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${NIBBLE_CCACHE})
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit 13 REQUIRED)
