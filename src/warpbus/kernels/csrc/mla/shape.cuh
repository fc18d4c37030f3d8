// The shapes of multi-head latent attention (MLA) that kernels are compiled for.
//
// They are those of GLM-4.7-Flash and GLM-5. The names are those of `LatentAttentionSpec` in models/latent_spec.py.
#pragma once

constexpr int kRank = 512;              // features of a latent, which is the value of the absorbed form
constexpr int kRope = 64;               // features of a rotary key
constexpr int kKeyDim = kRank + kRope;  // of a key of the absorbed form
constexpr int kNope = 192;              // features of a head's query without positions
constexpr int kQueryDim = kNope + kRope;
