"""What a captured step is rewritten to gives the same numbers."""

import pytest


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_stay_last_behind_images_with_one_channel(channels):
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    from kerasdp.backends.torch.graph_passes import keep_channels_last

    images, kernel = torch.randn(2, 6, 6, channels), torch.randn(4, channels, 3, 3)

    def step(images, kernel):
        found = torch.nn.functional.conv2d(images.permute(0, 3, 1, 2), kernel)
        return found, found.relu().sum((0, 2, 3))

    graph = make_fx(step, tracing_mode="fake")(images, kernel)
    nodes = len(graph.graph.nodes)
    keep_channels_last(graph.graph)
    graph.recompile()
    assert len(graph.graph.nodes) - nodes == (1 if channels == 1 else 0)
    for own, expected in zip(graph(images, kernel), step(images, kernel), strict=True):
        torch.testing.assert_close(own, expected)
    if channels == 1:
        assert graph(images, kernel)[0].is_contiguous(memory_format=torch.channels_last)
