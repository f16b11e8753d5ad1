"""One small model of every family of timm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.from_torchvision import smallest
from benchmarks.zoo.member import Member

# a family's module and its smallest model or models
FAMILIES = {
    "beit": "beit_base_patch16_224",
    "byoanet": "eca_halonext26ts",
    "byobnet": "test_byobnet mobileone_s0",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convmixer": "convmixer_768_32",
    "convnext": "test_convnext convnext_atto",
    "cpubone": "cpubone_nano",
    "crossvit": "crossvit_tiny_240",
    "csatv2": "csatv2",
    "cspnet": "cs3darknet_focus_s",
    "cspnext": "cspnext_tiny",
    "davit": "davit_tiny",
    "deepseek_vit": "deepseek_vit_412m",
    "deit": "deit_tiny_patch16_224",
    "densenet": "densenet121",
    "dla": "dla34",
    "dpn": "dpn68",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "test_efficientnet test_efficientnet_gn",
    "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb",
    "fasternet": "fasternet_t0",
    "fastvit": "fastvit_s12",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_b",
    "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny",
    "hrnet": "hrnet_w18_small",
    "iformer": "iformer_t",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "levit": "levit_384_s8",
    "lowformer": "lowformer_b0",
    "mambaout": "test_mambaout mambaout_femto",
    "maxxvit": "test_coatnet maxvit_pico_rw_256",
    "metaformer": "caformer_s18",
    "mlp_mixer": "gmlp_ti16_224",
    "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_siglip",
    "nasnet": "nasnetalarge",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "nfnet": "test_nfnet nf_regnet_b0",
    "pit": "pit_xs_224",
    "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0",
    "qwen3_vit": "qwen3_vit_88m",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_004_tv",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m1",
    "res2net": "res2net50_14w_8s",
    "resnest": "resnest14d",
    "resnet": "test_resnet resnet10t",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnext26_32x4d",
    "sequencer": "sequencer2d_s",
    "shvit": "shvit_s1",
    "sknet": "skresnet18",
    "starnet": "starnet_s050 starnet_s050",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window16_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224",
    "tresnet": "tresnet_m",
    "twins": "twins_svt_small",
    "vgg": "vgg11_bn",
    "visformer": "visformer_tiny",
    "vision_transformer": "test_vit test_vit2",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_relpos": "test_vit_relpos vit_srelpos_small_patch16_224",
    "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224",
    "volo": "volo_d1_224",
    "vovnet": "ese_vovnet19b_slim_dw",
    "xception": "legacy_xception",
    "xception_aligned": "xception41p",
    "xcit": "xcit_nano_12_p8_224",
}

# families with no small member: fewer layers of the same
SHALLOW = {"deepseek_vit_412m": {"depth": 2}, "gemma4_vit_167m": {"depth": 2}, "qwen3_vit_88m": {"depth": 2}}

# its attention multiplies (B, N) by (N, B): every example attends to the batch
MIXES = ("csatv2",)


def members() -> Iterator[Member]:
    for family, names in FAMILIES.items():
        for name in names.split():
            yield Member("timm", family, name, partial(build, name), name in MIXES)


def build(name: str) -> tuple[nn.Module, Any]:
    import timm

    for size in (64, 96, 128):
        try:
            model = (
                timm.create_model(name, pretrained=False, img_size=size, **SHALLOW.get(name, {}))
                .eval()
                .double()
            )
            x = torch.randn(2, 3, size, size, dtype=torch.float64)
            with torch.no_grad():
                model(x)
            return model, x
        except TypeError:  # the model takes images of any size, or of one size only
            break
        except Exception:  # noqa: BLE001 - too small for its patches and windows
            continue
    return smallest(timm.create_model(name, pretrained=False, **SHALLOW.get(name, {})))
