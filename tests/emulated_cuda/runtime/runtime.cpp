// A CUDA runtime without a GPU: device memory is host memory, and kernels are written down instead
// of run.  It is preloaded before torch's and FBGEMM's CUDA builds, whose host code does not notice.
//
// Everything happens at once and in the order of the calls, so that streams and events are nothing
// but numbers.  What was called is kept as a list of events while somebody records.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// The headers give these other names; the libraries ask for the plain ones, too.
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kMemory = 80ul << 30;
constexpr size_t kLargestAllocation = 2ul << 30;  // the host's memory is less than a GPU's
constexpr int kMultiprocessors = 132;
constexpr int kVersion = 13000;

enum class Memory { kPageable, kPinned, kDevice, kManaged };

struct Range {
  size_t size;
  Memory kind;
  int device;
};

struct Event {
  std::string what;
  size_t bytes;  // of a kernel, its blocks
  unsigned long stream;
  int device;  // that was current
};

std::mutex mutex;
std::map<char*, Range> ranges;
bool recording = false;
std::atomic<long> last_handle{1000};
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// Libraries register their kernels before this file's own objects need be there.
std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}

std::vector<Event>& events() {
  static auto* events = new std::vector<Event>;
  return *events;
}

int device_count() {
  static const int count = getenv("EMULATED_GPUS") ? atoi(getenv("EMULATED_GPUS")) : 1;
  return count;
}

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

template <typename Handle>
cudaError_t new_handle(Handle* handle) {
  *handle = reinterpret_cast<Handle>(++last_handle);
  return cudaSuccess;
}

Range range_of(const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return {0, Memory::kPageable, -2};
  const auto& [begin, range] = *std::prev(next);
  if (address >= begin + range.size) return {0, Memory::kPageable, -2};
  return range;
}

void note(std::string what, size_t bytes = 0, const void* stream = nullptr) {
  std::lock_guard<std::mutex> guard(mutex);
  if (recording) {
    events().push_back(
        {std::move(what), bytes, reinterpret_cast<unsigned long>(stream), current_device});
  }
}

cudaError_t allocate(void** pointer, size_t size, Memory kind) {
  size = size ? size : 1;
  if (size > kLargestAllocation) return failed(cudaErrorMemoryAllocation);
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  *pointer = address;
  std::lock_guard<std::mutex> guard(mutex);
  ranges[static_cast<char*>(address)] = {size, kind, current_device};
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = ranges.find(static_cast<char*>(pointer));
  if (found != ranges.end()) {
    munmap(pointer, found->second.size);
    ranges.erase(found);
  }
  return cudaSuccess;
}

const char* name_of(Memory kind) {
  switch (kind) {
    case Memory::kPinned: return "pinned";
    case Memory::kPageable: return "pageable";
    default: return "device";
  }
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const std::string way =
      std::string(name_of(range_of(from).kind)) + ">" + name_of(range_of(to).kind);
  note("copy " + way, bytes, stream);
  memmove(to, from, bytes);
  return cudaSuccess;
}

bool is_launchable(dim3 grid, dim3 block) {
  const size_t threads = size_t{block.x} * block.y * block.z;
  return grid.x && grid.y && grid.z && threads && threads <= 1024 && block.z <= 64 &&
         grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
}

cudaError_t launch(const std::string& name, dim3 grid, dim3 block, cudaStream_t stream) {
  if (!is_launchable(grid, block)) return failed(cudaErrorInvalidConfiguration);
  note("kernel " + name, size_t{grid.x} * grid.y * grid.z, stream);
  return cudaSuccess;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, cudaStream_t stream) {
  auto found = kernel_names().find(function);
  return launch(found == kernel_names().end() ? "?" : found->second, grid, block, stream);
}

}  // namespace

// ---------------------------------------------------------------- what tests ask for

API void emulator_record(int on) {
  std::lock_guard<std::mutex> guard(mutex);
  recording = on;
  if (on) events().clear();
}
API long emulator_size() {
  std::lock_guard<std::mutex> guard(mutex);
  return events().size();
}
API const char* emulator_what(long i) { return events()[i].what.c_str(); }
API long emulator_bytes(long i) { return events()[i].bytes; }
API unsigned long emulator_stream(long i) { return events()[i].stream; }
API int emulator_device(long i) { return events()[i].device; }
API void emulator_mark(const char* what) { note(what); }
// For the driver, through which Triton launches its kernels.
API int emulator_launch(const char* name, const unsigned* grid, const unsigned* block,
                        void* stream) {
  return launch(std::string(name), dim3(grid[0], grid[1], grid[2]),
                dim3(block[0], block[1], block[2]), static_cast<cudaStream_t>(stream));
}

// ---------------------------------------------------------------- kernels

API void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(calloc(1, 64)); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  kernel_names()[function] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

namespace {
thread_local dim3 pushed_grid, pushed_block;
thread_local size_t pushed_shared;
thread_local void* pushed_stream;
}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         struct CUstream_st* stream) {
  pushed_grid = grid;
  pushed_block = block;
  pushed_shared = shared;
  pushed_stream = stream;
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed_grid;
  *block = pushed_block;
  *shared = pushed_shared;
  *static_cast<void**>(stream) = pushed_stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t,
                                   cudaStream_t stream) {
  return launch(static_cast<const void*>(kernel), grid, block, stream);
}
API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                 cudaStream_t stream) {
  return launch(function, grid, block, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                    void**) {
  return launch(function, config->gridDim, config->blockDim, config->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**,
                                            size_t, cudaStream_t stream) {
  return launch(function, grid, block, stream);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                              size_t) {
  *blocks = 4;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                       int, size_t, unsigned) {
  *blocks = 4;
  return cudaSuccess;
}

// ---------------------------------------------------------------- devices

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "Emulated H100");
  properties->major = 9;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = 32;
  properties->totalGlobalMem = kMemory;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = properties->managedMemory = 1;
  properties->concurrentManagedAccess = properties->cooperativeLaunch = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrIntegrated: *value = 0; break;
    default: *value = 1;  // most others ask whether the device can do something
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  snprintf(id, size, "0000:00:%02d.0", device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetByPCIBusId(int* device, const char*) {
  *device = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  note("sync cudaDeviceSynchronize");
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    default: return "another error of the emulated CUDA runtime";
  }
}
API const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// ---------------------------------------------------------------- memory

API cudaError_t cudaMalloc(void** pointer, size_t size) {
  note("allocate device", size);
  return allocate(pointer, size, Memory::kDevice);
}
API cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) {
  return allocate(pointer, size, Memory::kDevice);
}
API cudaError_t cudaMallocManaged(void** pointer, size_t size, unsigned) {
  return allocate(pointer, size, Memory::kManaged);
}
API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  note("allocate pinned", size);
  return allocate(pointer, size, Memory::kPinned);
}
API cudaError_t cudaFree(void* pointer) {
  note("free device");
  return release(pointer);
}
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
API cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  std::lock_guard<std::mutex> guard(mutex);
  ranges[static_cast<char*>(pointer)] = {size, Memory::kPinned, current_device};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  ranges.erase(static_cast<char*>(pointer));
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kMemory;
  *free = kMemory - (10ul << 30);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  const Range range = range_of(pointer);
  attributes->device = range.device;
  switch (range.kind) {
    case Memory::kPageable: attributes->type = cudaMemoryTypeUnregistered; return cudaSuccess;
    case Memory::kPinned: attributes->type = cudaMemoryTypeHost; break;
    case Memory::kDevice: attributes->type = cudaMemoryTypeDevice; break;
    case Memory::kManaged: attributes->type = cudaMemoryTypeManaged; break;
  }
  attributes->hostPointer = attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  note("sync cudaMemcpy", bytes);
  return copy(to, from, bytes, nullptr);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                    cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind,
                                  cudaStream_t stream) {
  const std::string way =
      std::string(name_of(range_of(from).kind)) + ">" + name_of(range_of(to).kind);
  note("copy " + way, width * height, stream);
  for (size_t row = 0; row < height; row++) {
    memmove(static_cast<char*>(to) + row * to_pitch,
            static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  note("memset", bytes);
  memset(to, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  note("memset", bytes, stream);
  memset(to, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}
API cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned,
                                     cudaStream_t) {
  return cudaSuccess;
}
API cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) {
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return new_handle(pool); }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}

// ---------------------------------------------------------------- streams and events

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return new_handle(stream);
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return new_handle(stream);
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  note("sync cudaStreamSynchronize", 0, stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  note("wait", 0, stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                         unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                         const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return new_handle(event); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return new_handle(event); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
  note("event", 0, stream);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t stream, unsigned) {
  note("event", 0, stream);
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  note("sync cudaEventSynchronize");
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorNotSupported;
}
