// What a compiled graph needs to be loaded and called, in place of torch's runtime for compiled
// models. Torch's runtime has constants, several models and a thousand templates; it takes the
// C++ compiler five seconds. A graph of this package has no constants, and can be called by
// several threads at once.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>
#include <initializer_list>
#include <utility>

#define AOTI_TORCH_ERROR_CODE_CHECK(call) torchrl_marl::check(call)
#define CACHE_TORCH_DTYPE(name) static auto cached_torch_dtype_##name = aoti_torch_dtype_##name()
#define CACHE_TORCH_DEVICE(name) \
  static auto cached_torch_device_type_##name = aoti_torch_device_type_##name()
#define CACHE_TORCH_LAYOUT(name) static auto cached_torch_layout_##name = aoti_torch_layout_##name()
#define GRAPH_API extern "C" __attribute__((__visibility__("default")))

namespace torchrl_marl {
struct Failed {};

[[gnu::noinline, gnu::cold, noreturn]] static void fail() { throw Failed(); }

inline void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) fail();
}
}  // namespace torchrl_marl

namespace torch::aot_inductor {
using DeviceStreamType = void*;

// Owner of a tensor.
class RAIIAtenTensorHandle {
 public:
  RAIIAtenTensorHandle(AtenTensorHandle handle = nullptr) : handle_(handle) {}
  RAIIAtenTensorHandle(RAIIAtenTensorHandle&& other) : handle_(other.release()) {}
  RAIIAtenTensorHandle& operator=(RAIIAtenTensorHandle&& other) {
    if (this != &other) {
      reset();
      handle_ = other.release();
    }
    return *this;
  }
  ~RAIIAtenTensorHandle() { reset(); }

  operator AtenTensorHandle() const { return handle_; }
  AtenTensorHandle get() const { return handle_; }

  AtenTensorHandle release() {
    AtenTensorHandle handle = handle_;
    handle_ = nullptr;
    return handle;
  }

  [[gnu::noinline]] void reset() {
    if (handle_) aoti_torch_delete_tensor_object(release());
  }

  [[gnu::noinline]] void* data_ptr() const {
    void* data;
    torchrl_marl::check(aoti_torch_get_data_ptr(handle_, &data));
    return data;
  }

 private:
  AtenTensorHandle handle_;
};

// Inputs that are taken over one by one.
class Inputs {
 public:
  explicit Inputs(AtenTensorHandle* handles) : handles_(handles) {}
  RAIIAtenTensorHandle operator[](int i) { return RAIIAtenTensorHandle(handles_[i]); }
  void clear() {}

 private:
  AtenTensorHandle* handles_;
};

inline Inputs steal_from_raw_handles_to_raii_handles(AtenTensorHandle* handles, size_t) {
  return Inputs(handles);
}

[[gnu::noinline]] static AtenTensorHandle reinterpret_tensor_wrapper(
    AtenTensorHandle self, int64_t ndim, const int64_t* sizes, const int64_t* strides,
    int64_t offset) {
  AtenTensorHandle view;
  torchrl_marl::check(aoti_torch__reinterpret_tensor(self, ndim, sizes, strides, offset, &view));
  return view;
}

inline AtenTensorHandle unwrap_raii_handle_if_needed(const RAIIAtenTensorHandle& handle) {
  return handle.get();
}

inline RAIIAtenTensorHandle wrap_with_raii_handle_if_needed(AtenTensorHandle handle) {
  return RAIIAtenTensorHandle(handle);
}

template <class T>
T& temporary_reference(T&& t) {
  return t;
}

struct AOTInductorModelKernels {};

struct AOTInductorModel {
  int32_t device_idx_ = -1;
  AOTInductorModelKernels own;
  AOTInductorModelKernels* kernels = &own;

  void run_impl(AtenTensorHandle*, AtenTensorHandle*, DeviceStreamType, AOTIProxyExecutorHandle);
};
}  // namespace torch::aot_inductor

// The interface through which torch loads and calls a graph.
GRAPH_API int32_t AOTInductorModelContainerCreateWithDevice(
    void** graph, size_t, const char*, const char*) {
  *graph = new torch::aot_inductor::AOTInductorModel();
  return 0;
}

GRAPH_API int32_t AOTInductorModelContainerDelete(void* graph) {
  delete static_cast<torch::aot_inductor::AOTInductorModel*>(graph);
  return 0;
}

GRAPH_API int32_t AOTInductorModelContainerGetNumOutputs(void*, size_t* number) {
  *number = TORCHRL_MARL_OUTPUTS;
  return 0;
}

GRAPH_API int32_t AOTInductorModelContainerGetNumConstants(void*, size_t* number) {
  *number = 0;
  return 0;
}

GRAPH_API int32_t AOTInductorModelContainerRun(
    void* graph, AtenTensorHandle* inputs, size_t, AtenTensorHandle* outputs, size_t, void* stream,
    AOTIProxyExecutorHandle executor) {
  const bool before = aoti_torch_grad_mode_is_enabled();
  aoti_torch_grad_mode_set_enabled(false);
  int32_t error = 0;
  try {
    auto* model = static_cast<torch::aot_inductor::AOTInductorModel*>(graph);
    model->run_impl(inputs, outputs, stream, executor);
  } catch (...) {
    error = 1;
  }
  aoti_torch_grad_mode_set_enabled(before);
  return error;
}

GRAPH_API int32_t AOTInductorGetLastError(const char** message) {
  *message = "an operation of a compiled graph failed";  // torch has printed which
  return 0;
}

// Torch looks for these, too. They concern constants, of which a graph has none.
#define ABSENT(name) \
  GRAPH_API int32_t AOTInductor##name() { return 1; }
ABSENT(ModelContainerExtractConstantsMap)
ABSENT(ModelContainerExtractConstantsMapEntries)
ABSENT(ModelContainerFreeInactiveConstantBuffer)
ABSENT(ModelContainerGetCallSpec)
ABSENT(ModelContainerGetConstantDataSize)
ABSENT(ModelContainerGetConstantDtype)
ABSENT(ModelContainerGetConstantFromFolded)
ABSENT(ModelContainerGetConstantName)
ABSENT(ModelContainerGetConstantOriginalFQN)
ABSENT(ModelContainerGetConstantType)
ABSENT(ModelContainerGetConstantsBlobSize)
ABSENT(ModelContainerGetInputName)
ABSENT(ModelContainerGetNumInputs)
ABSENT(ModelContainerGetOutputName)
ABSENT(ModelContainerRunConstantFolding)
ABSENT(ModelContainerRunSingleThreaded)
ABSENT(ModelContainerSwapConstantBuffer)
ABSENT(ModelContainerUpdateConstantBuffer)
ABSENT(ModelContainerUpdateConstantBufferFromCpu)
ABSENT(ModelContainerUpdateInactiveConstantBuffer)
ABSENT(ModelContainerUpdateUserManagedConstantBuffer)
ABSENT(ModelUpdateConstantsFromBlob)
