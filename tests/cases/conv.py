"""Convolutions with every argument, transposed ones, and what stands between them."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from cases.case import Net, case, labels, param, sliced_ce, wave

EVEN_SAME = "ignore:Using padding='same':UserWarning"


def conv(dims, b, channels, size, *args, **kwargs):
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*channels, *args, **kwargs)
    return nn.Sequential(layer, nn.Tanh()), torch.randn(b, channels[0], *size), None, wave


def transposed(dims, b, channels, size, *args, **kwargs):
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](*channels, *args, **kwargs)
    return nn.Sequential(layer, nn.Tanh()), torch.randn(b, channels[0], *size), None, wave


@case("conv")
def conv1d(b):
    return conv(1, b, (3, 4), (11,), 3)


@case("conv")
def conv1d_every_argument(b):
    return conv(1, b, (4, 6), (17,), 3, stride=2, dilation=3, padding=2, groups=2)


@case("conv")
def conv1d_stride_larger_than_kernel(b):
    return conv(1, b, (2, 4), (13,), 2, stride=5, padding=1)


@case("conv")
def conv2d(b):
    return conv(2, b, (3, 4), (7, 8), 3)


@case("conv")
def conv2d_without_bias(b):
    return conv(2, b, (3, 4), (6, 5), (3, 2), bias=False)


@case("conv")
def conv2d_stride_that_truncates(b):
    return conv(2, b, (3, 5), (10, 12), 3, stride=3)


@case("conv")
def conv2d_every_argument(b):
    return conv(2, b, (4, 8), (13, 11), (3, 2), stride=(2, 3), padding=(1, 0), dilation=(2, 1), groups=2)


@case("conv")
def conv2d_depthwise(b):
    return conv(2, b, (6, 12), (7, 6), 3, groups=6, padding=1)


@case("conv")
def conv2d_pointwise(b):
    return conv(2, b, (4, 5), (3, 4), 1)


@case("conv")
def conv2d_pointwise_with_stride(b):
    return conv(2, b, (4, 6), (5, 6), 1, stride=2, groups=2)


@case("conv")
def conv2d_kernel_as_large_as_the_input(b):
    return conv(2, b, (3, 4), (4, 5), (4, 5))


@case("conv")
def conv2d_padding_valid(b):
    return conv(2, b, (2, 3), (6, 5), 3, padding="valid", dilation=2)


@case("conv")
def conv2d_padding_same(b):
    return conv(2, b, (2, 4), (6, 5), (3, 5), padding="same", groups=2)


@case("conv", warns=(EVEN_SAME,))
def conv2d_padding_same_even_kernel_dilated(b):
    return conv(2, b, (3, 4), (7, 8), 4, padding="same", dilation=2)


@case("conv", warns=(EVEN_SAME,))
def conv1d_padding_same_even_kernel(b):
    return conv(1, b, (2, 3), (7,), 2, padding="same")


@case("conv")
def conv2d_circular(b):
    return conv(2, b, (3, 4), (7, 6), 3, padding=(2, 1), padding_mode="circular")


@case("conv")
def conv2d_reflect_same(b):
    return conv(2, b, (3, 4), (7, 6), 3, padding="same", padding_mode="reflect")


@case("conv")
def conv1d_reflect(b):
    return conv(1, b, (3, 4), (9,), 3, padding=2, padding_mode="reflect", stride=2)


@case("conv")
def conv3d_replicate(b):
    return conv(3, b, (2, 2), (3, 4, 3), 2, padding=1, padding_mode="replicate")


@case("conv")
def conv3d(b):
    return conv(3, b, (2, 3), (4, 5, 4), 3, padding=1)


@case("conv")
def conv3d_every_argument(b):
    return conv(
        3, b, (4, 4), (6, 7, 5), (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(2, 1, 1), groups=2
    )


@case("conv")
def functional_conv(b):
    net = Net(lambda s, x: F.conv2d(x, s.k, s.b, (2, 1), 1), k=param(4, 2, 3, 2), b=param(4))
    return net, torch.randn(b, 2, 6, 5), None, wave


@case("conv")
def cnn_of_the_paper(b):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 2 * 2, 5),
    )  # fmt: skip
    return net, torch.randn(b, 3, 16, 16), labels(b), F.cross_entropy


@case("conv")
def cnn_with_a_loss_of_its_own(b):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    return net, torch.randn(b, 3, 6, 6), labels(b), sliced_ce


@case("conv")
def separable_conv_with_residual(b):
    def forward(s, x):
        return F.gelu(x + s.point(s.depth(x)))

    net = Net(forward, depth=nn.Conv2d(4, 4, 3, padding=1, groups=4), point=nn.Conv2d(4, 4, 1))
    return net, torch.randn(b, 4, 5, 5), None, wave


@case("conv")
def unet_with_interpolation(b):
    def forward(s, x):
        down = torch.relu(s.down(x))
        up = F.interpolate(
            s.mid(F.avg_pool2d(down, 2)), scale_factor=2.0, mode="bilinear", align_corners=False
        )
        return s.out(torch.cat([down, up], 1))

    net = Net(forward, down=nn.Conv2d(2, 3, 3, padding=1), mid=nn.Conv2d(3, 3, 1), out=nn.Conv2d(6, 5, 1))
    return net, torch.randn(b, 2, 6, 6), torch.zeros(b, 6, 6, dtype=torch.long), F.cross_entropy


@case("conv")
def channel_shuffle_and_pixel_shuffle(b):
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, groups=2), nn.ChannelShuffle(2), nn.PixelShuffle(2), nn.Conv2d(2, 3, 2)
    )
    return net, torch.randn(b, 2, 5, 5), None, wave


@case("conv")
def convolution_by_unfold(b):
    net = Net(lambda s, x: s.w @ F.unfold(x, 3, padding=1, stride=2) + s.b, w=param(4, 18), b=param(4, 1))
    return net, torch.randn(b, 2, 5, 6), None, wave


@case("conv")
def conv_and_lambda_layers_in_channels_last(b):
    model, x, y, loss = conv(2, b, (3, 4), (6, 5), 3, padding=1)
    return model, x.to(memory_format=torch.channels_last), y, loss


@case("conv")
def conv1d_over_channels_swapped_with_time(b):
    net = Net(lambda s, x: s.conv(x.transpose(1, 2)).transpose(1, 2), conv=nn.Conv1d(3, 4, 3, padding=1))
    return net, torch.randn(b, 6, 3), None, wave


@case("conv")
def causal_dilated_convs(b):
    def forward(s, x):
        for layer in s.layers:
            x = x + torch.tanh(layer(F.pad(x, (2 * layer.dilation[0], 0))))
        return x

    layers = nn.ModuleList(nn.Conv1d(3, 3, 3, dilation=d) for d in (1, 2, 4))
    return Net(forward, layers=layers), torch.randn(b, 3, 7), None, wave


@case("conv", "transposed")
def conv_transpose1d_every_argument(b):
    return transposed(1, b, (4, 6), (5,), 3, stride=3, padding=1, output_padding=1, dilation=2, groups=2)


@case("conv", "transposed")
def conv_transpose2d(b):
    return transposed(2, b, (3, 2), (4, 5), 3)


@case("conv", "transposed")
def conv_transpose2d_every_argument(b):
    return transposed(
        2, b, (4, 6), (4, 3), (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), groups=2
    )


@case("conv", "transposed")
def conv_transpose2d_depthwise_without_bias(b):
    return transposed(2, b, (4, 4), (3, 4), 2, stride=2, groups=4, bias=False)


@case("conv", "transposed")
def conv_transpose3d(b):
    return transposed(3, b, (2, 3), (2, 3, 2), 2, stride=2, padding=1, dilation=(1, 2, 1))


@case("conv", "transposed")
def autoencoder(b):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
    )  # fmt: skip
    x = torch.randn(b, 2, 6, 6)
    return net, x, x, F.mse_loss
