"""Models: where they split, the names of their tensors, what is shared, their initial weights."""

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from models import (
    MODELS,
    SplitModel,
    batch_norm_names,
    build_model,
    head_layers,
    initialise,
    output_widths,
    tensor_names,
)
from models.build import BUILDERS

SHAPES: dict[str, tuple[int, ...]] = {
    "mlp": (1, 8, 8),
    "cnn2": (1, 28, 28),
    "cnn2-small": (1, 28, 28),
    "cnn3": (3, 32, 32),
    "cnn5": (3, 32, 32),
    "cnn5-bn": (3, 32, 32),
    "cnn5-wide": (3, 32, 32),
    "cnn5-wide-bn": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "vgg11": (3, 32, 32),
    "fasttext": (200,),
}
VGG11 = (27 * 64 + 64) + (576 * 128 + 128) + (1152 * 256 + 256) + (2304 * 256 + 256) + (2304 * 512 + 512)
CNN5 = (75 * 6 + 6) + (150 * 16 + 16) + (400 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)
CNN5_WIDE = (75 * 16 + 16) + (400 * 32 + 32) + (800 * 2000 + 2000) + (2000 * 500 + 500) + (500 * 10 + 10)
VGG11 += 3 * (4608 * 512 + 512) + 2 * (512 * 512 + 512) + (512 * 10 + 10)


def make(name: str, *, head_layers: int = 1, classes: int = 10, seed: int = 0) -> SplitModel:
    return build_model(name, SHAPES[name], classes, head_layers, torch.Generator().manual_seed(seed))


def inputs(name: str, samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "fasttext":
        return torch.randint(1, 2**15, (samples, *SHAPES[name]), generator=generator, dtype=torch.int32)
    return torch.rand(samples, *SHAPES[name], generator=generator)


def test_every_model_is_tried() -> None:
    assert set(SHAPES) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "parameters", "features"),
    [
        # weights and biases, layer by layer, as one counts them from the papers
        ("mlp", (64 * 128 + 128) + (128 * 64 + 64) + (64 * 10 + 10), 64),
        ("cnn2", (25 * 32 + 32) + (25 * 32 * 64 + 64) + (1024 * 512 + 512) + (512 * 10 + 10), 512),
        ("cnn2-small", (25 * 16 + 16) + (25 * 16 * 32 + 32) + (800 * 128 + 128) + (128 * 10 + 10), 128),
        ("cnn3", (27 * 16 + 16) + (16 * 16 * 32 + 32) + (9 * 32 * 64 + 64) + (256 * 64 + 64) + (64 * 10 + 10), 64),
        ("cnn5", CNN5, 84),
        ("cnn5-bn", CNN5 + 2 * (6 + 16), 84),
        ("cnn5-wide", CNN5_WIDE, 500),
        ("cnn5-wide-bn", CNN5_WIDE + 2 * (16 + 32), 500),
        ("resnet18", 11_173_962, 512),
        ("vgg11", VGG11, 512),
        ("fasttext", 32768 * 32 + (32 * 32 + 32) + (32 * 10 + 10), 32),
    ],
)
def test_sizes(name: str, parameters: int, features: int) -> None:
    model = make(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert output_widths(model, SHAPES[name])[0] == features
    assert model.classifier.out_features == 10


def test_widths_of_inputs_that_no_memory_holds() -> None:
    """The first client to join says how large inputs are."""
    assert output_widths(make("resnet18"), (3, 2**16, 2**16)) == (512, [64, 64, 128, 256, 512])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("head_layers", [1, 2])
def test_the_split_changes_names_and_nothing_else(name: str, head_layers: int) -> None:
    whole, split = make(name), make(name, head_layers=head_layers)
    x = inputs(name, 3)
    whole.eval(), split.eval()
    assert torch.equal(whole(x), split(x))
    names = tensor_names(split, "extractor") + tensor_names(split, "head")
    assert names == tensor_names(split, "model")
    assert (tensor_names(split, "head") == ["head.weight", "head.bias"]) == (head_layers == 1)


def test_an_unknown_part_is_none() -> None:
    with pytest.raises(ValueError, match=r"part = 'extractors': must be one of .* \(did you mean 'extractor'\?\)"):
        tensor_names(make("mlp"), "extractors")  # type: ignore[arg-type]


def test_a_head_of_two_layers_keeps_their_names() -> None:
    names = tensor_names(make("cnn2", head_layers=2), "head")
    assert names == ["head.fc1.weight", "head.fc1.bias", "head.fc.weight", "head.fc.bias"]


def test_a_head_of_all_linear_layers() -> None:
    lengths = {name: head_layers(name, shape, "linear") for name, shape in SHAPES.items()}
    # Of mlp, all of whose layers are linear, one is left to extract.
    lenet = dict.fromkeys(["cnn5", "cnn5-bn", "cnn5-wide", "cnn5-wide-bn"], 3)
    assert lengths == {
        "mlp": 2,
        "cnn2": 2,
        "cnn2-small": 2,
        "cnn3": 2,
        **lenet,
        "resnet18": 1,
        "vgg11": 3,
        "fasttext": 2,
    }
    names = tensor_names(make("vgg11", head_layers=3), "head")
    assert names == [f"head.{layer}.{kind}" for layer in ("fc1", "fc2", "fc") for kind in ("weight", "bias")]
    assert tensor_names(make("fasttext", head_layers=2), "extractor") == ["extractor.embedding.weight"]


def test_a_split_that_leaves_no_extractor() -> None:
    with pytest.raises(ConfigError, match="head-layers = 4: must be from 1 to 3, model 'cnn2' has 4 layers"):
        make("cnn2", head_layers=4)


@pytest.mark.parametrize(("shape", "have"), [((1, 8, 8), "8 x 8 images"), ((20,), "20 features")])
def test_inputs_that_a_model_cannot_take(shape: tuple[int, ...], have: str) -> None:
    with pytest.raises(ConfigError, match=f"model = 'cnn2': needs images of at least 16 x 16, the data have {have}"):
        build_model("cnn2", shape, 10, 1, torch.Generator())


def test_the_smallest_images_that_a_model_takes() -> None:
    sizes = {"cnn2": 16, "cnn2-small": 12, "cnn5": 16, "cnn5-wide-bn": 16, "cnn3": 24, "vgg11": 17}
    for name, smallest in sizes.items():
        model = build_model(name, (1, smallest, smallest), 10, 1, torch.Generator())
        assert model(torch.zeros(1, 1, smallest, smallest)).shape == (1, 10)
        with pytest.raises(ConfigError):
            build_model(name, (1, smallest - 1, smallest), 10, 1, torch.Generator())


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "fasttext"])
def test_a_model_is_a_function_of_its_generator_and_leaves_the_global_one_alone(name: str) -> None:
    state = torch.random.get_rng_state()
    first, again, other = make(name), make(name), make(name, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    tensors = first.state_dict()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in tensors.items())
    assert not torch.equal(tensors["head.weight"], other.state_dict()["head.weight"])
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_linear_layers_start_within_one_over_root_of_fan_in() -> None:
    weight = make("mlp").state_dict()["extractor.fc1.weight"]  # fan-in 64: the bound is 1 / 8
    assert 0.12 < weight.abs().max() <= 0.125
    assert abs(weight.mean()) < 0.005


def test_vgg11_starts_as_he_et_al_do_so_that_inputs_make_a_difference() -> None:
    model = make("vgg11")
    bound = (6 / (9 * 256)) ** 0.5  # the fan-in of conv4
    assert 0.99 * bound < model.state_dict()["extractor.conv4.weight"].abs().max() <= bound
    assert model.state_dict()["extractor.conv4.bias"].abs().max() <= 1 / (9 * 256) ** 0.5
    with torch.no_grad():
        assert model(2 * inputs("vgg11", 20) - 1).std(0).mean() > 0.01  # 1e-5 under the bound of the others


def test_embeddings_start_standard_normal_with_padding_at_zero() -> None:
    weight = make("fasttext").state_dict()["extractor.embedding.weight"]
    assert not weight[0].any()
    assert abs(weight[1:].mean()) < 0.01
    assert abs(weight[1:].std() - 1) < 0.01
    plain = nn.Embedding(50, 3)
    initialise(plain, torch.Generator().manual_seed(0))
    assert plain.weight[0].any()  # without padding_idx no row is padding
    with pytest.raises(TypeError, match="no initialisation for PReLU"):
        initialise(nn.PReLU(3), torch.Generator())


def test_fasttext_takes_the_mean_over_the_words_and_leaves_padding_out() -> None:
    model = make("fasttext")
    weights = {name.removeprefix("extractor."): tensor for name, tensor in model.state_dict().items()}
    vectors = weights["embedding.weight"]
    texts = torch.zeros(3, 200, dtype=torch.int32)
    texts[0, :3] = torch.tensor([7, 9, 7])
    texts[1, :1] = 32767
    # Numbers that are no ids are left out, too.
    texts[2, :2] = torch.tensor([-1, 32768])
    means = torch.stack([(2 * vectors[7] + vectors[9]) / 3, vectors[32767], torch.zeros(32)])
    expected = means @ weights["fc1.weight"].T + weights["fc1.bias"]
    torch.testing.assert_close(model.features(texts), expected)
    # Shapes are probed with floating-point inputs, and UA-PDFL's unit tensor is one: both stand for ids.
    assert torch.equal(model(texts.float()), model(texts))
    model(texts).sum().backward()
    gradient = dict(model.named_parameters())["extractor.embedding.weight"].grad
    assert gradient is not None
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [7, 9, 32767]


def test_fasttext_and_images() -> None:
    expected = "model = 'fasttext': needs texts, a row of word ids each; the data have 32 x 28 images"
    with pytest.raises(ConfigError, match=expected):
        build_model("fasttext", (3, 32, 28), 4, 1, torch.Generator())


@pytest.mark.parametrize("name", SHAPES)
def test_channels_last_changes_the_layout_alone(name: str) -> None:
    model, x = make(name).eval(), inputs(name, 2)
    before = model(x)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), before)


def test_vgg11_on_smaller_and_larger_images() -> None:
    for side, left in ((28, 1), (32, 1), (64, 2)):
        model = build_model("vgg11", (1, side, side), 10, 3, torch.Generator())
        x = torch.rand(2, 1, side, side)
        assert model(x).shape == (2, 10)
        assert model.extractor(x).shape == (2, 512, left, left)


def test_batch_normalisation_is_found_by_type_at_any_depth() -> None:
    model = make("resnet18")
    names = batch_norm_names(model)
    assert "extractor.layer2.0.downsample.1.running_var" in names
    assert len(names) == 20 * 5
    assert len(batch_norm_names(model, buffers_only=True)) == 20 * 3
    shared = set(tensor_names(model, "model"))
    assert not any(name.endswith("num_batches_tracked") for name in shared)
    assert shared - set(tensor_names(model, "model", "local")) == {
        name for name in names if name.endswith(("running_mean", "running_var"))
    }
    assert set(tensor_names(model, "model-without-batch-norm")) == shared - names
    assert tensor_names(model, "nothing") == []


def test_stages_are_the_feature_maps_of_the_convolutional_blocks() -> None:
    model = make("cnn2")
    x = torch.rand(2, 1, 28, 28)
    output, maps = model.extractor.stages(x)
    assert torch.equal(output, model.extractor(x))
    assert [tuple(m.shape) for m in maps] == [(2, 32, 12, 12), (2, 64, 4, 4)]
    _, maps = make("resnet18").extractor.stages(torch.rand(2, 3, 32, 32))
    assert [m.shape[1] for m in maps] == [64, 64, 128, 256, 512]
    assert isinstance(model.head, nn.Linear)
    _, maps = make("vgg11").extractor.stages(torch.rand(2, 3, 32, 32))
    assert [tuple(m.shape[1:]) for m in maps] == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1)]
    output, maps = make("fasttext").extractor.stages(inputs("fasttext", 2))
    assert output.shape == (2, 32)
    assert maps == []


def test_a_model_of_one_layer_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "one", lambda shape, classes: BUILDERS["mlp"](shape, classes)[-1:])
    for count in (0, 1):
        with pytest.raises(ConfigError, match=r"^model = 'one': has one layer; it needs two, an extractor and a head$"):
            build_model("one", (64,), 10, count, None)
