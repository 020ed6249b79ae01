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


def test_numbers_become_part_of_the_kernels():
    """Of each type, exactly; also one that is changed in place. What is read but not made in the step stays."""
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    from kerasdp.backends.torch.graph_passes import bring_to_device

    table = torch.tensor([3.0])

    def step(x):
        count = torch.tensor(1)
        count.add_(2)
        small = x * 0.1 + torch.tensor(0.1) / torch.tensor([1e-7], dtype=torch.float64)
        half = x * torch.tensor(0.1, dtype=torch.bfloat16)
        array = x + torch.tensor([1.0, float("inf"), -0.0])
        torch.tensor(5.0) + 1  # which nobody uses
        return small, half, array / torch.tensor(-0.0), x + count, x + torch.tensor(True), x * table

    x = torch.randn(3)
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert bring_to_device(graph, x.device) == []
    graph.graph.lint()
    graph.recompile()
    constants = [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
    assert sorted(constant.numel() for constant in constants) == [1, 3]
    table[0] = 4.0
    for own, expected in zip(graph(x), step(x), strict=True):
        assert own.dtype == expected.dtype
        torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)
    first = graph(x)[3]
    assert torch.equal(graph(x)[3], first)  # the number that is changed begins again in each step
