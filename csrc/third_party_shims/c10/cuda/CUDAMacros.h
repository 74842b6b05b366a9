// SPDX-License-Identifier: Apache-2.0
//
// See CUDAStream.h.

#pragma once

#define C10_CUDA_API
#define C10_CUDA_CHECK(what) static_cast<void>(what)
