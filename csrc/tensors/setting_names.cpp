// SPDX-License-Identifier: Apache-2.0
#include "tensors/setting_names.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/StringUtil.h>

#include <array>

#include "tensors/context_layout.h"

namespace rematfn {
namespace {

using at::Context;

struct Switch {
  const char* name;
  bool (Context::*is_on)() const;
};

// Those that differ between versions of torch have no name.
constexpr std::array kSwitches{
    Switch{"torch.use_deterministic_algorithms", &Context::deterministicAlgorithms},
    Switch{"torch.utils.deterministic.fill_uninitialized_memory",
           &Context::deterministicFillUninitializedMemory},
    Switch{"torch.backends.mkldnn.enabled", &Context::userEnabledMkldnn},
    Switch{"torch.backends.mkldnn.deterministic", &Context::deterministicMkldnn},
    Switch{"torch.backends.mkldnn.allow_tf32", &Context::allowTF32OneDNN},
    Switch{"torch.backends.cudnn.enabled", &Context::userEnabledCuDNN},
    Switch{"torch.backends.cudnn.benchmark", &Context::benchmarkCuDNN},
    Switch{"torch.backends.cudnn.deterministic", &Context::deterministicCuDNN},
    Switch{"torch.backends.miopen.immediate", &Context::immediateMiopen},
    Switch{"torch.backends.nnpack", &Context::userEnabledNNPACK},
    Switch{"torch.backends.cuda.enable_flash_sdp", &Context::userEnabledFlashSDP},
    Switch{"torch.backends.cuda.enable_mem_efficient_sdp", &Context::userEnabledMemEfficientSDP},
    Switch{"torch.backends.cuda.enable_math_sdp", &Context::userEnabledMathSDP},
    Switch{"torch.backends.cuda.enable_cudnn_sdp", &Context::userEnabledCuDNNSDP},
    Switch{"torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
           &Context::allowFP16BF16ReductionMathSDP},
    Switch{"torch.backends.cuda.matmul.allow_fp16_accumulation",
           &Context::allowFP16AccumulationCuBLAS},
    Switch{"torch.backends.cpu.allow_fp16_reduced_precision_reduction",
           &Context::allowFP16ReductionCPU},
};

constexpr std::array kBackends{"generic", "cuda", "mkldnn"};
constexpr std::array kOperators{"all", "conv", "rnn", "matmul"};
constexpr std::array kPrecisions{"none", "ieee", "tf32", "bf16", "default"};

template <class Enum>
std::size_t index_of(Enum value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> describe_settings() {
  at::Context& context = at::globalContext();
  std::vector<std::pair<std::string, std::string>> described;
  for (const auto& [name, is_on] : kSwitches) {
    described.emplace_back(name, (context.*is_on)() ? "True" : "False");
  }
  const auto add = [&](const char* name, const auto& value) {
    described.emplace_back(name, c10::str(value));
  };
  add("torch.set_default_dtype", c10::get_default_dtype_as_scalartype());
  add("torch.backends.cudnn.benchmark_limit", context.benchmarkLimitCuDNN());
  add("torch.backends.quantized.engine", c10::toString(context.qEngine()));
  add("torch.backends.cuda.preferred_linalg_library",
      at::LinalgBackendToString(context.linalgPreferredBackend()));
  for (const auto& [backend, op, value] : parts_of_context().precisions) {
    described.emplace_back(c10::str("fp32_precision of ", kBackends.at(index_of(backend)), ".",
                                    kOperators.at(index_of(op))),
                           kPrecisions.at(index_of(*value)));
  }
  std::string order;
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
    order += (order.empty() ? "" : ", ") + std::to_string(static_cast<int>(backend));
  }
  add("the order of torch.nn.attention.sdpa_kernel", order);
  return described;
}

}  // namespace rematfn
