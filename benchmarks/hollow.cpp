// SPDX-License-Identifier: Apache-2.0
//
// hollow.cpp: a CUDA runtime without hardware, to be preloaded before a CUDA build of torch.
//
// torch's own code for CUDA runs on it: its dispatch, its autograd, its caching allocator. Kernels compute
// nothing. Device memory is host memory that has only been reserved, so that copies from and to the host copy.
// Everything is done as it is asked for: streams and events order nothing. cuBLAS is here too, and cuDNN is
// not: it is to be switched off. A stream may be captured in a graph, which counts its kernels; what CUDA forbids
// meanwhile is an error here, too.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

constexpr std::size_t total = 143771 * kMiB;  // an H200's
constexpr std::size_t kContext = 512 * kMiB;  // what a process takes of a real card before its first tensor

std::mutex mutex;
std::map<char*, std::size_t> blocks;  // device memory, by address
std::size_t used = kContext;
thread_local cudaError_t last = cudaSuccess;

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared;
  void* stream;
};
thread_local Configuration configuration;

int not_supported() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

cudaError_t fail(cudaError_t error) { return last = error; }

// The one capture that there may be at a time.
struct Capture {
  void* origin = nullptr;             // the stream that it began on; null: there is none
  std::set<void*> streams;            // it, and those that wait for it
  std::set<void*> forks;              // of these, what has not been waited for in turn
  std::map<void*, void*> events;      // recorded in it, and on which stream
  std::size_t kernels = 0;
  bool is_broken = false;
  unsigned long long id = 0;
};
Capture capture;
std::mutex capture_mutex;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

bool is_captured(void* stream) {
  const std::lock_guard lock(capture_mutex);
  return capture.streams.contains(stream);
}
// What would wait, or ask how far the device is.
cudaError_t unless_captured() {
  const std::lock_guard lock(capture_mutex);
  if (capture.origin == nullptr || mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  capture.is_broken = true;
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t launch(void* stream) {
  const std::lock_guard lock(capture_mutex);
  if (capture.streams.contains(stream)) ++capture.kernels;
  return cudaSuccess;
}

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T>
cudaError_t make(T* out) {
  *out = reinterpret_cast<T>(new double(now()));
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- what nvcc puts into a program ---------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) { return new void*(nullptr); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
  return launch(stream);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
  return launch(stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void*, void**) { return launch(how->stream); }

// ---- the device ----------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return unless_captured(); }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::strncpy(id, "0000:00:00.0", static_cast<std::size_t>(length));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "hollow");
  p->totalGlobalMem = total;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = 1;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  std::memset(a, 0, sizeof *a);
  a->binaryVersion = a->ptxVersion = 90;
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                   unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  Dl_info ours;
  dladdr(reinterpret_cast<void*>(&cudaGetDriverEntryPointByVersion), &ours);
  static void* const library = dlopen(ours.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *function = dlsym(library, symbol);
  if (*function == nullptr) *function = reinterpret_cast<void*>(&not_supported);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "hollow error"; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- memory --------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** out, std::size_t size) {
  if (const cudaError_t error = unless_captured(); error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  *out = nullptr;
  if (used + size > total) return fail(cudaErrorMemoryAllocation);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  blocks[static_cast<char*>(data)] = size;
  used += size;
  *out = data;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (const cudaError_t error = unless_captured(); error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  const auto found = blocks.find(static_cast<char*>(data));
  if (found == blocks.end()) return cudaSuccess;
  munmap(data, found->second);
  used -= found->second;
  blocks.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** out, std::size_t size, cudaStream_t) { return cudaMalloc(out, size); }
cudaError_t cudaFreeAsync(void* data, cudaStream_t) { return cudaFree(data); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* all) {
  const std::lock_guard lock(mutex);
  *free = total - used;
  *all = total;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, std::size_t size, unsigned) {
  return posix_memalign(out, 4096, size) == 0 ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* data) { std::free(data); return cudaSuccess; }
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t count, cudaMemcpyKind) {
  if (const cudaError_t error = unless_captured(); error != cudaSuccess) return error;
  std::memmove(to, from, count);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t count, cudaMemcpyKind kind, cudaStream_t) {
  // What no kernel has written need not be copied from device to device.
  if (kind != cudaMemcpyDeviceToDevice) std::memmove(to, from, count);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t,
                              cudaMemcpyKind, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaMemset(void*, int, std::size_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* data) {
  const std::lock_guard lock(mutex);
  std::memset(a, 0, sizeof *a);
  auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  const bool known = after != blocks.begin() && [&] {
    const auto& [first, size] = *std::prev(after);
    return static_cast<const char*>(data) < first + size;
  }();
  a->type = known ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->devicePointer = known ? const_cast<void*>(data) : nullptr;
  return cudaSuccess;
}

// ---- streams and events --------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return unless_captured(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return unless_captured(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(capture_mutex);
  const auto recorded = capture.events.find(event);
  if (recorded == capture.events.end()) {
    if (!capture.streams.contains(stream)) return cudaSuccess;
    capture.is_broken = true;
    return fail(cudaErrorStreamCaptureIsolation);
  }
  if (capture.streams.insert(stream).second) capture.forks.insert(stream);
  if (recorded->second != stream) capture.forks.erase(recorded->second);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     std::size_t*) {
  if (id != nullptr) *id = capture.id;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard lock(capture_mutex);
  if (capture.origin != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  capture = {.origin = stream, .streams = {stream}, .id = capture.id + 1};
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  const std::lock_guard lock(capture_mutex);
  const Capture ended = std::exchange(capture, {.id = capture.id});
  *graph = nullptr;
  if (ended.is_broken) return fail(cudaErrorStreamCaptureInvalidated);
  if (!ended.forks.empty()) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new std::size_t(ended.kernels));
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  *count = *reinterpret_cast<std::size_t*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t, unsigned long long) {
  return make(made);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return unless_captured(); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(capture_mutex);
  capture.events.erase(event);
  if (capture.streams.contains(stream)) capture.events[event] = stream;
  *reinterpret_cast<double*>(event) = now();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return unless_captured(); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = static_cast<float>(*reinterpret_cast<double*>(end) - *reinterpret_cast<double*>(start));
  return cudaSuccess;
}

// ---- cuBLAS: only that a handle exists is of interest --------------------------------------------

int cublasCreate_v2(void** handle) { *handle = new double(0); return 0; }
int cublasDestroy_v2(void*) { return 0; }
thread_local void* blas_stream = nullptr;
int cublasSetStream_v2(void*, void* stream) { blas_stream = stream; return 0; }
int cublasSetWorkspace_v2(void*, void*, std::size_t) { return 0; }
int cublasSetMathMode(void*, int) { return 0; }
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasSetPointerMode_v2(void*, int) { return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
#define HOLLOW_KERNEL(name) \
  int name() { return launch(blas_stream); }
HOLLOW_KERNEL(cublasSgemm_v2) HOLLOW_KERNEL(cublasDgemm_v2) HOLLOW_KERNEL(cublasGemmEx)
HOLLOW_KERNEL(cublasSgemmEx) HOLLOW_KERNEL(cublasSgemmStridedBatched) HOLLOW_KERNEL(cublasDgemmStridedBatched)
HOLLOW_KERNEL(cublasGemmStridedBatchedEx) HOLLOW_KERNEL(cublasSgemv_v2) HOLLOW_KERNEL(cublasDgemv_v2)
HOLLOW_KERNEL(cublasSdot_v2) HOLLOW_KERNEL(cublasDdot_v2) HOLLOW_KERNEL(cublasDotEx)
HOLLOW_KERNEL(cublasSgemmBatched) HOLLOW_KERNEL(cublasDgemmBatched) HOLLOW_KERNEL(cublasLtMatmul)
#undef HOLLOW_KERNEL
int cublasLtMatmulDescCreate(void** handle, int, int) { *handle = new double(0); return 0; }
int cublasLtMatmulDescDestroy(void*) { return 0; }
int cublasLtMatmulDescSetAttribute(void*, int, const void*, std::size_t) { return 0; }
int cublasLtMatmulPreferenceCreate(void** handle) { *handle = new double(0); return 0; }
int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, std::size_t) { return 0; }
int cublasLtMatrixLayoutCreate(void** handle, int, std::uint64_t, std::uint64_t, std::int64_t) {
  *handle = new double(0);
  return 0;
}
int cublasLtMatrixLayoutDestroy(void*) { return 0; }
int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, std::size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  std::memset(results, 0, 96);  // one cublasLtMatmulHeuristicResult_t
  *count = 1;
  return 0;
}

// ---- the driver: found under this library's name, libcuda.so.1 --------------------------------------

int cuInit(unsigned) { return 0; }
int cuCtxGetCurrent(void** context) { static int primary; *context = &primary; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuDeviceGetAttribute(int* value, int, int) { *value = 1; return 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = nullptr; return 0; }
int cuGetErrorString(int, const char** text) { *text = "hollow error"; return 0; }
// Segments that grow: addresses are reserved, and memory is put behind them piece by piece.
int cuMemGetAllocationGranularity(std::size_t* size, const void*, int) { *size = 2 * kMiB; return 0; }
int cuMemAddressReserve(void** data, std::size_t size, std::size_t, void*, unsigned long long) {
  *data = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *data == MAP_FAILED ? 2 : 0;  // CUDA_ERROR_OUT_OF_MEMORY
}
int cuMemAddressFree(void* data, std::size_t size) { return munmap(data, size); }
int cuMemCreate(std::size_t** handle, std::size_t size, const void*, unsigned long long) {
  const std::lock_guard lock(mutex);
  if (used + size > total) return 2;
  used += size;
  *handle = new std::size_t(size);
  return 0;
}
int cuMemRelease(std::size_t* handle) {
  const std::lock_guard lock(mutex);
  used -= *handle;
  delete handle;
  return 0;
}
int cuMemMap(void* data, std::size_t size, std::size_t, void*, unsigned long long) {
  return mprotect(data, size, PROT_READ | PROT_WRITE);
}
int cuMemSetAccess(void*, std::size_t, const void*, std::size_t) { return 0; }
int cuMemUnmap(void* data, std::size_t size) {
  madvise(data, size, MADV_DONTNEED);
  return mprotect(data, size, PROT_NONE);
}

#define HOLLOW_MISSING(name) \
  int name() { return not_supported(); }
HOLLOW_MISSING(cuFuncGetAttribute) HOLLOW_MISSING(cuFuncSetAttribute) HOLLOW_MISSING(cuFuncSetCacheConfig)
HOLLOW_MISSING(cuLaunchCooperativeKernel) HOLLOW_MISSING(cuLaunchKernel) HOLLOW_MISSING(cuLinkAddData_v2)
HOLLOW_MISSING(cuLinkComplete) HOLLOW_MISSING(cuLinkCreate_v2) HOLLOW_MISSING(cuModuleGetFunction)
HOLLOW_MISSING(cuModuleLoad) HOLLOW_MISSING(cuModuleLoadData) HOLLOW_MISSING(cuModuleLoadDataEx)
HOLLOW_MISSING(cuModuleUnload) HOLLOW_MISSING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
HOLLOW_MISSING(cuPointerGetAttribute) HOLLOW_MISSING(cuTensorMapEncodeTiled)
#undef HOLLOW_MISSING

}  // extern "C"
