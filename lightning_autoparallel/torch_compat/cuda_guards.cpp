// What a build of torch without CUDA lacks to trace for `cuda:0`: autograd asks for a device guard and for hooks, and
// attention asks which kernel to run. Nothing here touches a device; kernels and allocations still fail.
//
// Torch asks for the hooks once, while it is imported, so this has to be loaded before: through LD_PRELOAD.

#include <array>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

// By this name Python knows that the library is loaded.
extern "C" __attribute__((visibility("default"))) int lightning_autoparallel_cuda_guards() { return 1; }

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device only_device() { return Device(DeviceType::CUDA, 0); }

// One device with one stream, on which all work is done as soon as it is asked for.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return only_device(); }
  Device exchangeDevice(Device) const override { return only_device(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only_device()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, only_device()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, only_device()); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, only_device()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only_device()); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

// Which kernel attention runs on GPUs since Ampere: of those that torch's user allows, in the order that he set, the first
// that takes the call. The checks are those that torch's headers share among devices; what only CUDA's kernels ask for is
// from torch's documentation of scaled_dot_product_attention and from what its kernels refuse: flash takes half precision,
// heads of one size up to 256, no mask, and causal attention of as many queries as keys; the efficient kernel float32 too
// and masks, heads of a multiple of 16 bytes, and no grouped ones. cuDNN's takes half precision, masks and grouped heads,
// heads of a multiple of 8 up to 256, of one size or not, more than one key, where results need not be deterministic.
using sdp::sdp_params;
using sdp::SDPBackend;
constexpr int64_t kLargestFlashHead = 256;
constexpr int64_t kLargestCudnnHead = 256;
constexpr int64_t kCudnnHeadStep = 8;
constexpr int64_t kAlignedBytes = 16;

bool has_dense_rows(const sdp_params& params) {
  return sdp::check_tensor_shapes(params, false) && sdp::check_nested_tensor(params, false) &&
      sdp::check_nonzero_sequence_lengths_dense(params, false);
}

bool takes_flash(const sdp_params& params) {
  constexpr std::array<at::ScalarType, 2> kinds{at::kHalf, at::kBFloat16};
  const auto head = params.query.sym_size(-1);
  const bool is_square = params.query.sym_size(-2) == params.key.sym_size(-2);
  return sdp::check_runtime_disabled_flash(params, false) && has_dense_rows(params) &&
      sdp::check_last_dim_stride_equals_1_dense<true>(params, false) && sdp::check_for_attn_mask(params, false) &&
      sdp::check_batch_size_and_num_heads_dense<true>(params, false) &&
      sdp::check_tensor_dtype(params, kinds, false) && (is_square || !params.is_causal) &&
      params.key.sym_size(-1) == head && params.value.sym_size(-1) == head && head <= kLargestFlashHead;
}

bool takes_efficient(const sdp_params& params) {
  constexpr std::array<at::ScalarType, 3> kinds{at::kHalf, at::kFloat, at::kBFloat16};
  const auto head = params.query.sym_size(-1), value_head = params.value.sym_size(-1);
  const int64_t step = kAlignedBytes / static_cast<int64_t>(params.query.element_size());
  return sdp::check_runtime_disabled_mem_efficient(params, false) && has_dense_rows(params) &&
      sdp::check_last_dim_stride_equals_1_dense<false>(params, false) &&
      sdp::check_batch_size_and_num_heads_dense<false>(params, false) &&
      sdp::check_tensor_dtype(params, kinds, false) && params.key.sym_size(-1) == head && head > 0 &&
      value_head > 0 && head % step == 0 && value_head % step == 0;
}

bool takes_cudnn(const sdp_params& params) {
  constexpr std::array<at::ScalarType, 2> kinds{at::kHalf, at::kBFloat16};
  const auto& context = at::globalContext();
  const bool may_vary = !context.deterministicAlgorithms() || context.deterministicAlgorithmsWarnOnly();
  const auto takes_head = [](const c10::SymInt& head) {
    return head % kCudnnHeadStep == 0 && head <= kLargestCudnnHead;
  };
  const bool draws_for_one = params.dropout > 0.0 && params.query.sym_size(-2) == 1;
  return context.userEnabledCuDNNSDP() && may_vary && has_dense_rows(params) &&
      sdp::check_attn_mask_shape(params, false) && sdp::check_last_dim_stride_equals_1_dense<true>(params, false) &&
      sdp::check_batch_size_and_num_heads_dense<true, false>(params, false) &&
      sdp::check_tensor_dtype(params, kinds, false) && takes_head(params.query.sym_size(-1)) &&
      takes_head(params.value.sym_size(-1)) && params.key.sym_size(-2) != 1 && !draws_for_one;
}

bool takes(SDPBackend kernel, const sdp_params& params) {
  switch (kernel) {
    case SDPBackend::cudnn_attention:
      return takes_cudnn(params);
    case SDPBackend::flash_attention:
      return takes_flash(params);
    case SDPBackend::efficient_attention:
      return takes_efficient(params);
    case SDPBackend::math:
      return at::globalContext().userEnabledMathSDP();
    default:
      return false;
  }
}

int64_t choose_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double>,
    bool enable_gqa) {
  const sdp_params params{query, key, value, mask, dropout, is_causal, enable_gqa};
  for (const auto kernel : at::globalContext().sDPPriorityOrder()) {
    if (takes(kernel, params)) {
      return static_cast<int64_t>(kernel);
    }
  }
  TORCH_CHECK(false, "No available kernel. Aborting execution."); // in torch's own words
}

// When the library is loaded torch's own tables are there already: it links to them.
const bool registered = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();

} // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}

namespace at {
// the name by which torch looks for them
using CUDAHooks = Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at
