"""The operators that a client may call on the pool's side: PyTorch's that compute, and Warpbus's own.

A list, not a rule: an operator that opens files, reads another tensor's memory or keeps pointers is not on it, and one
that PyTorch adds tomorrow is not on it either. An entry names an operator with all its overloads, in place and `out=`
included. Views have no place here: a client makes them by itself, out of geometry.
"""

import functools

import torch
from torch._ops import OpOverload

from warpbus.errors import DeviceError
from warpbus.kernels.ops import (  # noqa: F401  # each registers operators of Warpbus's own
    activation,
    attention,
    cache,
    elementwise,
    gemm,
    gemv,
    norm,
    rope,
    sampling,
    trellis_linear,
    w8a8,
    wna16,
)

# Tensors out of nothing.
_MAKE = """
    arange bartlett_window blackman_window empty empty_like empty_permuted empty_strided eye fft_fftfreq
    fft_rfftfreq full full_like hamming_window hann_window kaiser_window linspace logspace new_empty
    new_empty_strided new_full new_ones new_zeros ones ones_like range scalar_tensor tril_indices triu_indices
    zeros zeros_like
"""

# Random numbers of the tenant's own generator.
_RANDOM = """
    _fused_dropout _sample_dirichlet _standard_gamma bernoulli binomial cauchy exponential geometric log_normal
    multinomial native_dropout normal normal_functional poisson rand rand_like randint randint_like randn
    randn_like random randperm rrelu_with_noise rrelu_with_noise_functional uniform
"""

# Over lists of tensors, `_foreach_` left out: optimizers.
_FOREACH = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1
    floor frac lerp lgamma log log10 log1p log2 max maximum minimum mm mul neg norm pow reciprocal round rsqrt
    sigmoid sign sin sinh sqrt sub tan tanh trunc zero
"""

# `special_` left out.
_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
    chebyshev_polynomial_v chebyshev_polynomial_w entr erfcx hermite_polynomial_h hermite_polynomial_he i0e i1
    i1e laguerre_polynomial_l legendre_polynomial_p log_ndtr modified_bessel_i0 modified_bessel_i1
    modified_bessel_k0 modified_bessel_k1 ndtri scaled_modified_bessel_k0 scaled_modified_bessel_k1
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w spherical_bessel_j0 xlog1py zeta
"""

# Factorizations and solvers.
_LINEAR_ALGEBRA = """
    _cholesky_solve_helper _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd
    cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_cross linalg_eig linalg_eigvals
    linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu
    linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular linalg_vector_norm
    lu_unpack ormqr triangular_solve
"""

# Attention.
_ATTENTION = """
    _efficient_attention_backward _efficient_attention_forward _flash_attention_backward
    _flash_attention_forward _fused_sdp_choice _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward
"""

# Derivatives.
_BACKWARD = """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _cdist_backward _ctc_loss_backward
    _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
    _fused_rms_norm_backward _log_softmax_backward_data _masked_softmax_backward _pdist_backward
    _prelu_kernel_backward _segment_reduce_backward _slow_conv2d_backward _softmax_backward_data
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
    _upsample_lanczos2d_aa_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward _weight_norm_interface_backward adaptive_avg_pool3d_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward
    batch_norm_backward binary_cross_entropy_backward convolution_backward diagonal_backward elu_backward
    embedding_dense_backward fractional_max_pool2d_backward fractional_max_pool3d_backward gelu_backward
    glu_backward glu_backward_jvp grid_sampler_2d_backward grid_sampler_3d_backward hardshrink_backward
    hardsigmoid_backward hardswish_backward hardtanh_backward huber_loss_backward leaky_relu_backward
    linear_backward log_sigmoid_backward logit_backward masked_scatter_backward matmul_backward
    max_pool2d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward mish_backward
    mse_loss_backward multi_margin_loss_backward multilabel_margin_loss_backward native_batch_norm_backward
    native_dropout_backward native_group_norm_backward native_layer_norm_backward nll_loss2d_backward
    nll_loss_backward reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward rrelu_with_noise_backward
    select_backward sigmoid_backward silu_backward slice_backward smooth_l1_loss_backward
    soft_margin_loss_backward softplus_backward softshrink_backward tanh_backward threshold_backward
    unfold_backward upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_trilinear3d_backward
"""

# Fused optimizers, normalization, loss scaling.
_FUSED = """
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_adagrad _fused_adam _fused_adamw
    _fused_rms_norm _fused_sgd
"""

# Rounding to the values of a quantized tensor, in floating point.
_FAKE_QUANTIZATION = """
    _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fused_moving_avg_obs_fq_helper
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
"""

# Everything else that computes.
_COMPUTE = """
    _to_copy __ilshift__ __irshift__ __lshift__ __rshift__ _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu
    _addmm_activation _aminmax _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
    _cdist_forward _chunk_cat _conj_physical _convolution _ctc_loss _cummax_helper _cummin_helper
    _dirichlet_grad _embedding_bag _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c
    _grouped_mm _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _index_put_impl
    _int_mm _log_softmax _logcumsumexp _masked_scale _masked_softmax _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _pdist_forward _prelu_kernel
    _safe_softmax _scaled_grouped_mm _scaled_mm _scaled_mm_v2 _slow_conv2d_forward _softmax _stack
    _standard_gamma_grad _transform_bias_rescale_qkv _trilinear _unique _unique2
    _unsafe_index _unsafe_index_put _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _weight_int8pack_mm _weight_norm_interface abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr
    affine_grid_generator all amax amin aminmax angle any argmax argmin as_strided_scatter asin asinh atan atan2
    atanh avg_pool1d avg_pool2d avg_pool3d baddbmm binary_cross_entropy binary_cross_entropy_with_logits
    bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor block_diag
    bmm bucketize cat ceil celu channel_shuffle clamp clamp_max clamp_min clone col2im complex conj_physical
    constant_pad_nd conv_depthwise3d convolution copy copysign cos cosh count_nonzero cummax cummin cumprod
    cumsum deg2rad diag_embed diagonal_scatter digamma dist div dot elu embedding embedding_renorm eq erf erfc
    erfinv exp exp2 expm1 fill flip floor floor_divide fmax fmin fmod frac fractional_max_pool2d
    fractional_max_pool3d frexp gather gcd ge gelu glu glu_jvp grid_sampler_2d grid_sampler_3d gt hardshrink
    hardsigmoid hardswish hardtanh hash_tensor heaviside histc histogram huber_loss hypot i0 igamma igammac
    im2col index index_add index_copy index_fill index_put index_reduce index_select isin isinf isnan isneginf
    isposinf kthvalue lcm ldexp le leaky_relu lerp lgamma linear log log10 log1p log2 log_sigmoid_forward
    log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp
    lt masked_fill masked_scatter masked_select max max_pool2d_with_indices max_pool3d_with_indices max_unpool2d
    max_unpool3d maximum mean median min minimum mish mm mode mse_loss mul multi_margin_loss
    multilabel_margin_loss_forward mv mvlgamma nan_to_num nanmedian nansum native_batch_norm
    native_channel_shuffle native_group_norm native_layer_norm native_norm ne neg nextafter nll_loss2d_forward
    nll_loss_forward nonzero nonzero_static norm pixel_shuffle pixel_unshuffle polar polygamma pow prod put
    rad2deg reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu remainder renorm repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d roll rot90 round rsqrt rsub scatter
    scatter_add scatter_reduce searchsorted segment_reduce select_scatter sgn sigmoid sign signbit silu sin sinc
    sinh slice_scatter slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
    slow_conv_transpose3d smooth_l1_loss soft_margin_loss softmax softplus softshrink sort sqrt stack std
    std_mean sub sum take tan tanh threshold topk trace tril triu trunc unique_consecutive unique_dim
    unique_dim_consecutive unsafe_split unsafe_split_with_sizes upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean
    vdot where xlogy zero
"""

ATEN = frozenset(
    name
    for names, prefix in (
        (_MAKE, ""),
        (_RANDOM, ""),
        (_FOREACH, "_foreach_"),
        (_SPECIAL, "special_"),
        (_LINEAR_ALGEBRA, ""),
        (_ATTENTION, ""),
        (_BACKWARD, ""),
        (_FUSED, ""),
        (_FAKE_QUANTIZATION, ""),
        (_COMPUTE, ""),
    )
    for name in (prefix + name for name in names.split())
)
"""Names in `torch.ops.aten`, without the underscore of those in place."""

SOLVERS = frozenset(_LINEAR_ALGEBRA.split())
"""Those of them whose libraries wait for the GPU in the middle."""


@functools.cache
def operator(name: str) -> OpOverload:
    """The operator called `name`, such as "aten::add.Tensor" or "warpbus::wna16".

    Raises:
        DeviceError: it is not on the list, or this PyTorch does not have it.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    listed = packet in ATEN or (packet.endswith("_") and packet.removesuffix("_") in ATEN)
    if namespace == "warpbus" or (namespace == "aten" and listed):
        try:
            found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except AttributeError:
            raise DeviceError(
                f"{name}: PyTorch {torch.__version__} has no such operator; use the same version"
            ) from None
        if isinstance(found, OpOverload):
            return found
    raise DeviceError(f"{name} is not among the operators that a pool runs; compute it on the client, on the CPU")


def warpbus_operators() -> tuple[OpOverload, ...]:
    """Those of Warpbus's own."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("Meta")
    return tuple(operator(name) for name in sorted(names) if name.startswith("warpbus::"))


def overloads(packet: str) -> tuple[OpOverload, ...]:
    """All overloads of `torch.ops.aten.<packet>` and of the same in place, where PyTorch has them."""
    found: list[OpOverload] = []
    for name in (packet, packet + "_"):
        listed = getattr(torch.ops.aten, name, None)
        if listed is not None:
            found.extend(getattr(listed, overload) for overload in listed.overloads())
    # Some overloads are of TorchScript's integers and lists, and no kernels of tensors.
    return tuple(each for each in found if torch._C._dispatch_has_kernel(each.name()))
