// Stands in for NVIDIA's driver, libcuda.so.1: what torch and FBGEMM do not load without, and what
// Triton launches its kernels through.  The rest is in runtime.cpp.
#include <cuda.h>

#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

extern "C" {
// Of runtime.cpp, which every process has preloaded.
int emulator_launch(const char*, const unsigned*, const unsigned*, void*) __attribute__((weak));
int cudaDeviceGetAttribute(int*, int, int) __attribute__((weak));
int cudaGetDevice(int*) __attribute__((weak));
}

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the emulated CUDA driver";
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, attribute, device));
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<long>(device) + 1);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1l);
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* device) {
  return static_cast<CUresult>(cudaGetDevice(device));
}
API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(1l);
  return CUDA_SUCCESS;
}
// A function is its name, for the record.
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(strdup(name));
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  *static_cast<CUdeviceptr*>(value) = pointer;  // Triton asks for the device's address
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 4;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned,
                            CUstream stream, void**, void**) {
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  return static_cast<CUresult>(
      emulator_launch(reinterpret_cast<const char*>(function), grid, block, stream));
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                              void** extra) {
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                        config->blockDimX, config->blockDimY, config->blockDimZ,
                        config->sharedMemBytes, config->hStream, arguments, extra);
}
