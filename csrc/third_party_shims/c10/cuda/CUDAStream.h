// SPDX-License-Identifier: Apache-2.0
//
// Stands in, with its neighbours, for headers that want CUDA's own, which a machine without CUDA lacks: so much
// as c10/cuda/CUDACachingAllocator.h needs to say which virtual functions an allocator has.

#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include <cstddef>

struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t : int {};
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);

namespace c10::cuda {
struct CUDAStream {
  explicit CUDAStream(c10::Stream);
};
}  // namespace c10::cuda
