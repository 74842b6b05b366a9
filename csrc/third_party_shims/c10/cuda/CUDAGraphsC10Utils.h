// SPDX-License-Identifier: Apache-2.0
//
// See CUDAStream.h: nothing of it is needed.

#pragma once
