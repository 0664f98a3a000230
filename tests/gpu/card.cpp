// A GPU that is not there: tensors of device "cuda" lie in the host's memory, and CPU kernels compute on them.
//
// Values of torch's own operators are therefore right. Each launch, upload and wait is told to `listener`.
// A CPU tensor beside a CUDA one is an error, as on a card; a number of no dimensions may travel with a launch.

#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

using namespace c10;
using at::Tensor;
using Stack = torch::jit::Stack;

namespace {

const Device CARD(DeviceType::CUDA, 0);
const Device HOST(DeviceType::CPU);

// kind: "launch", "upload" (host to device) or "wait" (the host needs a value of the device).
void (*listener)(const char* kind, const char* op) = nullptr;

void tell(const char* kind, const std::string& op) {
  if (listener) listener(kind, op.c_str());
}

// ------------------------------------------------------------------------------------- device, streams, hooks

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static Stream stream() { return Stream(Stream::DEFAULT, CARD); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return CARD; }
  Device getDevice() const override { return CARD; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : public at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return CARD; }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

// ------------------------------------------------------------------------------ one memory, seen from two sides

// The memory of a storage as one of another device; `owner` keeps it alive.
Storage seen_from(const Device& device, const Storage& owner) {
  auto release = [](void* kept) { delete static_cast<Storage*>(kept); };
  DataPtr memory(owner.mutable_data(), new Storage(owner), release, device);
  return Storage(
      Storage::use_byte_size_t(), owner.nbytes(), std::move(memory), GetCPUAllocator(), /*resizable=*/true);
}

// The tensor on `device`, over `storage`.
Tensor placed(const Tensor& x, const Device& device, Storage storage) {
  const DispatchKeySet key(device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
  Tensor y = at::detail::make_tensor<TensorImpl>(std::move(storage), key, x.dtype());
  y.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  if (x.is_conj()) y._set_conj(true);
  return y;
}

// The arguments of one call on the host, and what they were on the card.
struct Call {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // card, host
  std::vector<std::pair<Storage, Storage>> memories;
  bool numbers_only = true;  // no CPU tensor with dimensions
  bool masked = false;  // an argument is a mask

  Tensor to_host(const Tensor& x) {
    if (!x.defined()) return x;
    masked |= x.scalar_type() == at::kBool || x.scalar_type() == at::kByte;
    if (!x.is_cuda()) {
      numbers_only &= x.dim() == 0;
      return x;
    }
    for (auto& [card, host] : pairs)
      if (card.is_same(x)) return host;
    const Storage* memory = nullptr;  // arguments that share memory do so on the host
    for (auto& [card, host] : memories)
      if (card.is_alias_of(x.storage())) memory = &host;
    if (!memory) {
      memories.emplace_back(x.storage(), seen_from(HOST, x.storage()));
      memory = &memories.back().second;
    }
    pairs.emplace_back(x, placed(x, HOST, *memory));
    return pairs.back().second;
  }

  Tensor to_card(const Tensor& y, bool& fresh) {
    if (!y.defined()) return y;
    for (auto& [card, host] : pairs)
      if (host.is_same(y)) return card;
    for (auto& [card, host] : memories)
      if (host.is_alias_of(y.storage())) return placed(y, CARD, card);  // a view
    fresh = true;
    return placed(y, CARD, seen_from(CARD, y.storage()));
  }

  // What a call resized has new sizes, and perhaps new memory.
  void settle() {
    for (auto& [card, host] : memories)
      if (host.data() != card.data()) {
        Storage grown = seen_from(CARD, host);
        card.set_nbytes(grown.nbytes());
        card.set_data_ptr_noswap(grown.set_data_ptr(DataPtr(nullptr, CARD)));
      }
    for (auto& [card, host] : pairs)
      if (card.sizes() != host.sizes() || card.strides() != host.strides())
        card.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
};

IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& x : value.toTensorVector()) mapped.push_back(function(x));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& x : value.toOptionalTensorList())
      mapped.push_back(x ? std::optional<Tensor>(function(*x)) : std::nullopt);
    return mapped;
  }
  if (value.isDevice()) return HOST;
  return value;
}

// ------------------------------------------------------------------------------------------------- operators

void run_on_host(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  Call call;
  auto down = [&](const Tensor& x) { return call.to_host(x); };
  const size_t begin = stack->size() - schema.arguments().size();
  for (size_t i = begin; i < stack->size(); ++i) (*stack)[i] = map_tensors((*stack)[i], down);
  TORCH_CHECK(call.numbers_only, "simulated card: ", name, " has a CPU tensor beside a CUDA one");

  const bool by_index = name == "aten::index";  // by rows its shape is known, by a mask it is not
  if (op.hasTag(at::Tag::data_dependent_output) || (op.hasTag(at::Tag::dynamic_output_shape) && (!by_index || call.masked)))
    tell("wait", name);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.settle();

  bool fresh = false;
  auto up = [&](const Tensor& y) { return call.to_card(y, fresh); };
  const size_t first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = map_tensors((*stack)[i], up);

  if (name == "aten::empty" || name == "aten::empty_strided") {
    // Zero is what kernels that do not run here leave.
    const Tensor& y = stack->back().toTensor();
    if (y.storage().nbytes()) std::memset(y.storage().mutable_data(), 0, y.storage().nbytes());
  } else if (fresh || schema.is_mutable()) {
    const bool resizing = name == "aten::resize_" || name == "aten::set_";
    if (!resizing) tell("launch", name);
  }
}

Tensor& copy(DispatchKeySet, Tensor& self, const Tensor& source, bool) {
  if (!self.numel()) return self;
  const bool to_host = !self.is_cuda();
  tell(to_host ? "wait" : source.is_cuda() ? "launch" : "upload", "aten::copy_");
  Call call;
  at::AutoDispatchBelowADInplaceOrView below;
  call.to_host(self).copy_(call.to_host(source));
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", torch::CppFunction::makeFromUnboxedFunction(copy));
  // Composites of one launch a tensor, which a card has as one launch.
  for (const auto& name : Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0)
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

extern "C" void listen(void (*function)(const char*, const char*)) { listener = function; }
