// A CUDA device for machines without one: its memory is the CPU's, and the CPU's kernels compute in it. Tensors are on
// `cuda:0` to all of torch's Python and dispatcher, so that copies, constants and what is captured are a GPU's.
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {
using namespace c10;
const Device device(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, device);

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream getNewStream(Device, int) const override { return stream; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Memory final : Allocator {
  DataPtr allocate(size_t size) override {
    DataPtr found = GetCPUAllocator()->allocate(size);
    void* data = found.get();
    DeleterFnPtr deleter = found.get_deleter();
    return {data, found.release_context(), deleter, device};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
} memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &memory)

const DispatchKeySet keys(DispatchKey::CUDA);

at::Tensor empty(SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
                 std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, &memory, keys, dtype_or_default(dtype), format);
}

at::Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<ScalarType> dtype,
                         std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_symint_generic(size, stride, &memory, keys, dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
  on_cpu(self).copy_(on_cpu(from));
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return on_cpu(self).item(); }

at::Tensor view(const at::Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor as_strided(const at::Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> first) {
  auto offset = first ? std::optional<int64_t>(first->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset);
}

const at::Tensor& resize_(const at::Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

// Which a GPU has a kernel of its own for, and the CPU has not.
at::Tensor conv_depthwise2d(const at::Tensor& self, const at::Tensor& weight, SymIntArrayRef,
                            const std::optional<at::Tensor>& bias, SymIntArrayRef stride, SymIntArrayRef padding,
                            SymIntArrayRef dilation) {
  auto own_bias = bias && bias->defined() ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt;
  auto computed = at::conv2d(on_cpu(self), on_cpu(weight), own_bias, C10_AS_INTARRAYREF_SLOW(stride),
                             C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), self.size(1));
  auto result = at::empty(computed.sizes(), self.options());
  on_cpu(result).copy_(computed);
  return result;
}

void computed_on_cpu(const OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_conv_depthwise2d", conv_depthwise2d);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&computed_on_cpu>()); }
}  // namespace

namespace at {
struct Hooks : CUDAHooksInterface {
  Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at
