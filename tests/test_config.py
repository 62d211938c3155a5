"""`TrainConfig`: what it takes, what it refuses and how it says so, and YAML both ways."""

from __future__ import annotations

import dataclasses
import datetime as dt
import filecmp
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_training._internal.yaml_io import load_yaml
from rl_training.algorithms.ppo import PPOConfig
from rl_training.config import (
    TrainConfig,
    WrapperConfig,
    algo_config_type,
    config_from_file,
    config_from_mapping,
    find_config,
    preset_names,
    presets_dir,
)
from rl_training.errors import ConfigError, UserError
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runs import make_run_dir

ROOT = Path(__file__).resolve().parents[1]
FIELDS = {field.name for field in dataclasses.fields(TrainConfig)}


def config(**values: Any) -> TrainConfig[Any]:
    """A config from values of any type, wrong ones included."""
    return TrainConfig(**values)


def from_text(folder: Path, text: str) -> TrainConfig[Any]:
    """The config in a file with this text."""
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return config_from_file(path)


# -- construction ----------------------------------------------------------------------------------


def test_four_fields_are_enough(tmp_path: Path) -> None:
    made: TrainConfig[PPOConfig] = TrainConfig(
        algo="ppo", env_id="CartPole-v1", seed=7, output_dir=tmp_path
    )
    assert (made.algo, made.env_id, made.seed, made.output_dir) == (
        "ppo",
        "CartPole-v1",
        7,
        tmp_path,
    )
    assert made.algo_kwargs == PPOConfig()


def test_a_config_cannot_be_changed() -> None:
    made = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 8  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.algo_kwargs.gamma = 0.5


def test_algo_kwargs_are_typed_at_once() -> None:
    knobs = config(
        algo_kwargs={"gamma": 0.9, "hidden_sizes": [8, 8], "learning_rate": 1}
    ).algo_kwargs
    assert knobs == PPOConfig(gamma=0.9, hidden_sizes=(8, 8), learning_rate=1.0)
    assert type(knobs.learning_rate) is float
    assert type(knobs.hidden_sizes) is tuple


def test_algo_kwargs_may_be_the_dataclass_itself() -> None:
    knobs = PPOConfig(gamma=0.5)
    assert config(algo_kwargs=knobs).algo_kwargs is knobs


@pytest.mark.parametrize("given", [3, "gamma", [("gamma", 0.9)]])
def test_algo_kwargs_of_another_kind_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"'algo_kwargs' must be a mapping or PPOConfig"):
        config(algo_kwargs=given)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_no_knob_has_the_name_of_a_field(algo: str) -> None:
    knobs = {field.name for field in dataclasses.fields(algo_config_type(algo))}
    assert knobs
    assert not knobs & FIELDS, "overrides could not tell the knob from the field"


# -- unknown keys ----------------------------------------------------------------------------------


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'num_env'. Did you mean 'num_envs'\?"):
        config_from_mapping({"num_env": 4})


def test_an_unknown_field_far_from_all_names_the_command_that_lists_them() -> None:
    expected = "unknown key 'zzz'. 'rl-training train --algo ppo --help' lists"
    with pytest.raises(ConfigError, match=expected):
        config_from_mapping({"zzz": 4})


def test_an_unknown_knob_is_refused_with_the_nearest_name() -> None:
    expected = r"unknown key 'algo_kwargs.leraning_rate'. Did you mean 'learning_rate'\?"
    with pytest.raises(ConfigError, match=expected):
        config(algo_kwargs={"leraning_rate": 1e-3})


def test_an_unknown_override_is_refused_with_the_nearest_name() -> None:
    expected = r"unknown setting 'leraning_rate'. Did you mean 'learning_rate'\?"
    with pytest.raises(ConfigError, match=expected):
        config().with_overrides(leraning_rate=1e-3)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_knob_at_top_level_is_sent_to_algo_kwargs(algo: str) -> None:
    for knob in dataclasses.fields(algo_config_type(algo)):
        with pytest.raises(ConfigError, match=f"unknown key '{knob.name}'.*under 'algo_kwargs'"):
            config_from_mapping({"algo": algo, knob.name: 1})


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown algo 'ppoo'. Did you mean 'ppo'\?"):
        config(algo="ppoo")


# -- wrong types and impossible values -------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("algo", 3, "a string"),
        ("algo", ["ppo"], "a string"),
        ("algo", None, "a string"),
        ("seed", "7", "a whole number"),
        ("seed", True, "a whole number"),
        ("seed", None, "a whole number"),
        ("total_timesteps", 1.5, "a whole number"),
        ("total_timesteps", math.inf, "a whole number"),
        ("num_envs", [4], "a whole number"),
        ("env_id", 3, "a string"),
        ("env_kwargs", [1], "a mapping with string keys"),
        ("env_kwargs", {1: 2}, "a mapping with string keys"),
        ("worker_timeout", "60", "a number"),
        ("clip_obs", False, "a number"),
        ("normalize_obs", 1, "true or false"),
        ("normalize_obs", "yes", "true or false"),
        ("output_dir", 3, "a path"),
        ("init_from", 3, "a path"),
        ("torch_threads", "two", "a whole number"),
        ("device", "gpu", "one of 'auto', 'cpu', 'cuda', 'mps'"),
        ("vectorization", True, "one of 'sync', 'async', 'native'"),
        ("wrappers", "gymnasium.wrappers:ClipReward", "a list"),
    ],
)
def test_a_wrong_type_names_the_field(field: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"'{field}' must be {wanted}"):
        config(**{field: value})


@pytest.mark.parametrize(
    ("knob", "value", "wanted"),
    [
        ("learning_rate", "1e-3", "a number"),
        ("anneal_lr", 0, "true or false"),
        ("num_steps", 12.5, "a whole number"),
        ("hidden_sizes", 64, "a list"),
        ("hidden_sizes", [64, "64"], "a whole number"),
        ("activation", "swish", "one of 'tanh', 'relu'"),
        ("encoder", 3, "a string"),
    ],
)
def test_a_wrong_type_names_the_knob(knob: str, value: Any, wanted: str) -> None:
    for make in (
        lambda: config(algo_kwargs={knob: value}),
        lambda: PPOConfig(**{knob: value}),
        lambda: config().with_overrides(**{knob: value}),
    ):
        with pytest.raises(ConfigError, match=rf"'algo_kwargs\.{knob}.*' must be {wanted}"):
            make()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "'seed' must be zero or more; got -1"),
        ({"num_envs": 0}, "'num_envs' must be at least 1; got 0"),
        ({"total_timesteps": 0}, "'total_timesteps' must be at least 1; got 0"),
        ({"eval_interval": -1}, "'eval_interval' must be zero or more; got -1"),
        ({"eval_episodes": -1}, "'eval_episodes' must be zero or more; got -1"),
        ({"checkpoint_interval": -1}, "'checkpoint_interval' must be zero or more"),
        ({"log_interval_steps": 0}, "'log_interval_steps' must be at least 1"),
        ({"keep_checkpoints": 0}, "'keep_checkpoints' must be at least 1; got 0"),
        ({"worker_timeout": 0}, "'worker_timeout' must be above 0"),
        ({"clip_obs": math.nan}, "'clip_obs' must be above 0; got nan"),
        ({"clip_reward": -1.0}, "'clip_reward' must be above 0"),
        ({"torch_threads": 0}, "'torch_threads' must be at least 1"),
        ({"env_id": " "}, "'env_id' must be the id of an environment"),
        ({"vectorization": "native", "wrappers": ["a:B"]}, "'wrappers' cannot be put around"),
        ({"wrappers": ["TimeLimit"]}, "named as 'module:Class'; got 'TimeLimit'"),
    ],
)
def test_an_impossible_value_is_told_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"gamma": 1.01}, "gamma' must be between 0 and 1; got 1.01"),
        ({"gamma": math.nan}, "gamma' must be between 0 and 1; got nan"),
        ({"gae_lambda": -0.1}, "gae_lambda' must be between 0 and 1"),
        ({"learning_rate": 0.0}, "learning_rate' must be above 0"),
        ({"learning_rate": math.inf}, "learning_rate' must be"),
        ({"num_steps": 0}, "num_steps' must be at least 1"),
        ({"update_epochs": 0}, "update_epochs' must be at least 1"),
        ({"num_minibatches": 0}, "num_minibatches' must be at least 1"),
        ({"clip_coef": 0.0}, "clip_coef' must be above 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm' must be above 0"),
        ({"ent_coef": -0.01}, "ent_coef' must be zero or more"),
        ({"vf_coef": math.inf}, "vf_coef' must be"),
        ({"log_std_init": math.nan}, "log_std_init' must be"),
        ({"target_kl": 0.0}, "target_kl' must be above 0"),
        ({"hidden_sizes": [64, 0]}, "hidden_sizes' must be widths of at least 1"),
    ],
)
def test_an_impossible_knob_is_told_what_is_allowed(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(algo_kwargs=knobs)
    assert f"'algo_kwargs.{message}" in str(caught.value)


def test_minibatches_must_divide_the_rollout() -> None:
    expected = r"num_minibatches' must be a divisor of the rollout.* 3 \* 10 = 30; got 4"
    with pytest.raises(ConfigError, match=expected):
        config(num_envs=3, algo_kwargs={"num_steps": 10, "num_minibatches": 4})
    assert config(num_envs=3, algo_kwargs={"num_steps": 10, "num_minibatches": 5}).num_envs == 3


def test_a_minibatch_holds_more_than_one_row() -> None:
    # The deviation of a single advantage is not a number.
    with pytest.raises(ConfigError, match="num_minibatches"):
        config(num_envs=2, algo_kwargs={"num_steps": 4, "num_minibatches": 8})


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-3", 1e-3), ("2.5E-4", 2.5e-4), ("1e6", 1e6), ("1.0e-3", 1e-3), (".5", 0.5), ("3", 3)],
)
def test_what_looks_like_a_number_is_one(tmp_path: Path, text: str, number: float) -> None:
    assert from_text(tmp_path, f"clip_obs: {text}").clip_obs == number


def test_steps_may_be_written_as_a_power_of_ten(tmp_path: Path) -> None:
    made = from_text(tmp_path, "total_timesteps: 1e6\nnum_envs: 4.0")
    assert (made.total_timesteps, made.num_envs) == (1_000_000, 4)
    assert type(made.total_timesteps) is int
    assert type(config(total_timesteps=1e6).total_timesteps) is int


def test_steps_are_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'total_timesteps' must be a whole number; got 1\.5"):
        from_text(tmp_path, "total_timesteps: 1.5")


@pytest.mark.parametrize("text", ["'1e-3'", '"1e-3"'])
def test_a_quoted_number_is_a_string(tmp_path: Path, text: str) -> None:
    assert from_text(tmp_path, f"wandb_project: {text}").wandb_project == "1e-3"


# -- YAML out equals YAML in -----------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [
        "1e-3",
        "null",
        "yes",
        "~",
        "0x1F",
        "1_000",
        "2001-01-01",
        "- a",
        "a: b",
        "#",
        "é\n漢",
        ".inf",
        "a\x85",
        "\u2028b",
    ]
)
NAME = TEXT.filter(lambda text: bool(text.strip()))
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.sampled_from(
    [1e-3, 1e6, 2.5e-4, 1e-300, 1e22]
)
SHARE = st.floats(0, 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KWARGS = st.dictionaries(TEXT, PLAIN, max_size=3)
PATHS = NAME.map(Path)
WRAPPERS = st.builds(
    WrapperConfig,
    path=st.builds(lambda module, name: f"{module}:{name}", NAME, NAME).filter(
        lambda path: bool(path.partition(":")[0])
    ),
    kwargs=KWARGS,
)
KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": POSITIVE,
        "anneal_lr": st.booleans(),
        "update_epochs": st.integers(1, 100),
        "gamma": SHARE,
        "gae_lambda": SHARE,
        "clip_coef": POSITIVE,
        "target_kl": st.none() | POSITIVE,
        "hidden_sizes": st.lists(st.integers(1, 4096), max_size=3),
        "activation": st.sampled_from(["tanh", "relu", "silu"]),
        "log_std_init": st.floats(-10, 10),
        "encoder": st.none() | TEXT,
    },
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "env_id": NAME,
        "seed": st.integers(0, 2**64),
        "total_timesteps": st.integers(1, 10**12),
        "env_kwargs": KWARGS,
        "vectorization": st.sampled_from(["sync", "async"]),
        "worker_timeout": POSITIVE,
        "wrappers": st.lists(WRAPPERS, max_size=2),
        "normalize_obs": st.booleans(),
        "clip_obs": POSITIVE,
        "device": st.sampled_from(["auto", "cpu", "cuda", "mps"]),
        "torch_threads": st.none() | st.integers(1, 64),
        "eval_interval": st.integers(0, 10**9),
        "output_dir": PATHS,
        "init_from": st.none() | PATHS,
        "wandb_project": TEXT,
        "algo_kwargs": KNOBS,
    },
)


@settings(deadline=None)
@example(values={"env_id": "line\x85ends\u2028in\u2029unicode\ufeff"})
@example(values={"env_id": "line\r\nends \n\r here\t\n\n"})
@given(values=CONFIGS)
def test_yaml_out_equals_yaml_in(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    before = config(**values)
    path.write_text(before.to_yaml(), encoding="utf-8")
    after = config_from_file(path)
    assert after == before
    assert repr(after) == repr(before), "1 and 1.0 are equal and yet not the same"


def test_plain_values_build_an_equal_config() -> None:
    before = config(
        seed=3,
        output_dir=Path("somewhere"),
        wrappers=[WrapperConfig("a:B", {"x": 1})],
        algo_kwargs={"hidden_sizes": (8,)},
    )
    plain = before.to_dict()
    assert plain["output_dir"] == "somewhere"
    assert plain["wrappers"] == [{"path": "a:B", "kwargs": {"x": 1}}]
    assert plain["algo_kwargs"]["hidden_sizes"] == [8]
    assert config_from_mapping(plain) == before


def test_what_yaml_cannot_hold_is_refused_by_name() -> None:
    # Found out when the run folder is written, it would leave half a run behind.
    with pytest.raises(ConfigError, match="env_kwargs"):
        config(env_kwargs={"thing": object()})


# -- files -----------------------------------------------------------------------------------------


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"{re.escape(str(tmp_path))}.*unknown key 'sede'.*'seed'"
    ):
        from_text(tmp_path, "sede: 3")


def test_an_empty_file_is_the_default_config(tmp_path: Path) -> None:
    assert from_text(tmp_path, "# nothing yet\n") == config()


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must hold a mapping of settings, not list"):
        from_text(tmp_path, "- seed: 3")


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("seed: 1\nnum_envs: 2\nseed: 3", "seed", 3),
        ("algo_kwargs:\n  gamma: 0.9\n  gamma: 0.8", "gamma", 3),
        ("env_kwargs: {a: 1, a: 2}", "a", 1),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(
    tmp_path: Path, text: str, key: str, line: int
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.yaml: duplicate key '{key}' \(line {line}\)"):
        from_text(tmp_path, text)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has format 2; .* reads format 1 .*newer rl_training"):
        from_text(tmp_path, "format: 2\nseed: 3")
    assert from_text(tmp_path, "format: 1\nseed: 3").seed == 3


@pytest.mark.parametrize(
    "text",
    [
        "seed: [1",
        "seed: 1\n\tnum_envs: 2",
        "seed: *nowhere",
        "{a: 1}: 2",
        "env_id: 2001-13-45",
        "seed: !!int seven",
        "seed: 0x_",
        "env_kwargs: " + "[" * 5000,
    ],
    ids=[
        "unclosed",
        "tab",
        "alias",
        "mapping key",
        "no such month",
        "no such integer",
        "no such hex",
        "too deep",
    ],
)
def test_what_is_not_yaml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml is not valid YAML") as caught:
        from_text(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir",
        "!!python/object/new:os.mkdir",
        "!!python/name:os.mkdir",
        "!!python/object/apply:pathlib.Path.mkdir",
    ],
)
def test_nothing_in_a_file_is_executed(tmp_path: Path, tag: str) -> None:
    target = tmp_path / "made-by-yaml"
    argument = "" if "name" in tag else f" ['{target}']"
    with pytest.raises(ConfigError, match="not valid YAML"):
        from_text(tmp_path, f"env_kwargs: {{x: {tag}{argument}}}")
    assert not target.exists()


def test_an_anchor_may_be_merged_and_changed() -> None:
    text = "a: &base {x: 1, y: 2}\nb: {<<: *base, x: 3}"
    assert load_yaml(text, "here")["b"] == {"x": 3, "y": 2}


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00seed")
    with pytest.raises(ConfigError, match="cannot read"):
        config_from_file(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*gone\.yaml does not exist"):
        config_from_file(tmp_path / "gone.yaml")


# -- presets and precedence ------------------------------------------------------------------------


def test_there_are_presets() -> None:
    assert "ppo/cartpole" in preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_its_format(name: str) -> None:
    made = config_from_file(name)
    assert made.algo == name.partition("/")[0]
    assert load_yaml(find_config(name).read_text(encoding="utf-8"), name)["format"] == 1


def test_the_packaged_presets_are_the_configs_folder() -> None:
    outside = ROOT / "configs"
    assert presets_dir().resolve() == outside.resolve()
    compared = filecmp.dircmp(outside, presets_dir())
    assert not compared.left_only
    assert not compared.right_only


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'ppo/cartpol'. Did you mean 'ppo/cartpole'\?"):
        config_from_file("ppo/cartpol")


def test_file_lies_over_preset_and_overrides_lie_over_both(tmp_path: Path) -> None:
    preset = config_from_file("ppo/cartpole")
    text = """
        preset: ppo/cartpole
        seed: 11
        num_envs: 2
        algo_kwargs: {gamma: 0.5, update_epochs: 3}
    """
    from_file = from_text(tmp_path, text)
    assert from_file == preset.with_overrides(seed=11, num_envs=2, gamma=0.5, update_epochs=3)
    assert from_file.algo_kwargs.num_steps == preset.algo_kwargs.num_steps != PPOConfig().num_steps

    final = from_file.with_overrides(seed=12, gamma=0.6)
    assert (final.seed, final.num_envs, final.env_id) == (12, 2, preset.env_id)
    assert (final.algo_kwargs.gamma, final.algo_kwargs.update_epochs) == (0.6, 3)
    assert from_file.seed == 11, "an override makes a copy"


def test_a_file_that_names_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    expected = r"config\.yaml: no preset 'ppo/cartpol'. Did you mean 'ppo/cartpole'\?"
    with pytest.raises(ConfigError, match=expected):
        from_text(tmp_path, "preset: ppo/cartpol")


@pytest.mark.parametrize("knobs", ["3", "gamma", "[1]"])
def test_algo_kwargs_of_another_kind_over_a_preset_are_refused(tmp_path: Path, knobs: str) -> None:
    with pytest.raises(ConfigError, match="algo_kwargs"):
        from_text(tmp_path, f"preset: ppo/cartpole\nalgo_kwargs: {knobs}")


def test_algo_kwargs_of_another_kind_are_refused_as_an_override() -> None:
    with pytest.raises(ConfigError, match="algo_kwargs"):
        config().with_overrides(algo_kwargs=3)


def test_another_algorithm_does_not_inherit_the_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "twin", ALGORITHMS["ppo"])
    made = from_text(tmp_path, "preset: ppo/cartpole\nalgo: twin\nalgo_kwargs: {gamma: 0.5}")
    assert made.algo_kwargs == PPOConfig(gamma=0.5)
    assert made.num_envs == config_from_file("ppo/cartpole").num_envs


def test_overrides_take_fields_knobs_and_algo_kwargs() -> None:
    base = config(algo_kwargs={"gamma": 0.5, "ent_coef": 0.3})
    made = base.with_overrides(num_envs=4, gamma=0.6, algo_kwargs={"vf_coef": 0.7})
    assert made.num_envs == 4
    assert made.algo_kwargs == PPOConfig(gamma=0.6, ent_coef=0.3, vf_coef=0.7)
    replaced = base.with_overrides(algo_kwargs=PPOConfig(gamma=0.9))
    assert replaced.algo_kwargs == PPOConfig(gamma=0.9)


# -- wrappers --------------------------------------------------------------------------------------


def test_a_wrapper_is_a_string_or_a_mapping(tmp_path: Path) -> None:
    text = """
        wrappers:
          - gymnasium.wrappers:ClipReward
          - path: gymnasium.wrappers:TimeLimit
            kwargs: {max_episode_steps: 5}
    """
    assert from_text(tmp_path, text).wrappers == (
        WrapperConfig("gymnasium.wrappers:ClipReward"),
        WrapperConfig("gymnasium.wrappers:TimeLimit", {"max_episode_steps": 5}),
    )


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (3, r"'wrappers\[1\]' must be 'module:Class' or a mapping, \{path: .*; got 3"),
        (dict, r"'wrappers\[1\]': name the class as text, 'builtins:dict'"),
        ({"paht": "a:B"}, r"unknown key 'wrappers\[1\]\.paht'. Did you mean 'path'\?"),
        ({"path": "a:B", "kwargs": [1]}, r"'wrappers\[1\]\.kwargs' must be a mapping"),
        ({"kwargs": {}}, r"'?wrappers\[1\].*path"),
        (":B", "named as 'module:Class'"),
        ("a:", "named as 'module:Class'"),
    ],
)
def test_a_wrong_wrapper_is_named(wrapper: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(wrappers=["a:B", wrapper])


# -- run folders -----------------------------------------------------------------------------------


def test_a_run_folder_is_named_after_its_run(tmp_path: Path) -> None:
    before = dt.datetime.now(dt.UTC).replace(microsecond=0)
    made = make_run_dir(config(env_id="CartPole-v1", seed=7, output_dir=tmp_path / "deep" / "runs"))
    assert made.is_dir()
    assert made.parent == tmp_path / "deep" / "runs"
    match = re.fullmatch(r"ppo__CartPole-v1__seed7__(\d{8}T\d{6}Z)", made.name)
    assert match
    stamp = dt.datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.UTC)
    assert before <= stamp <= dt.datetime.now(dt.UTC)


@pytest.mark.parametrize(
    "env_id",
    [
        "ALE/Breakout-v5",
        "my_pkg:My/../Env-v0",
        "../../escape-v0",
        "/etc/passwd",
        "..",
        "a b\n\t*?<>|\\:-v0",
        "漢字-v0",
        "x" * 1000,
        "💥",
    ],
)
def test_a_run_folder_is_safe_whatever_the_id(tmp_path: Path, env_id: str) -> None:
    made = make_run_dir(config(env_id=env_id, output_dir=tmp_path / "runs"))
    assert made.resolve().parent == (tmp_path / "runs").resolve()
    assert re.fullmatch(r"ppo__[A-Za-z0-9._-]+__seed1__\d{8}T\d{6}Z", made.name)
    assert len(made.name) < 200
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_runs_that_start_in_the_same_second_have_their_own_folders(tmp_path: Path) -> None:
    made = config(output_dir=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: make_run_dir(made), range(24)))
    assert len(set(folders)) == 24
    assert all(folder.is_dir() for folder in folders)


def test_an_output_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.write_text("mine")
    with pytest.raises(UserError, match=f"run folder {re.escape(str(path))}.*[Nn]ot a directory"):
        make_run_dir(config(output_dir=path))
    assert path.read_text() == "mine"


def test_the_number_of_environments_depends_on_the_algorithm() -> None:
    assert TrainConfig().num_envs == 8
    assert TrainConfig(algo="sac", env_id="Pendulum-v1").num_envs == 1
    assert TrainConfig(env_id="Pendulum-v1").for_algo("sac").num_envs == 1
    assert TrainConfig(num_envs=8).for_algo("dqn").num_envs == 8


def test_there_are_ten_evaluations_by_default() -> None:
    config: TrainConfig[Any] = TrainConfig(total_timesteps=30_000)
    assert config.eval_interval == 3_000
    assert config.with_overrides(total_timesteps=500).eval_interval == 50
    assert dataclasses.replace(config, total_timesteps=500).eval_interval == 50
    assert config.with_overrides(eval_interval=7, total_timesteps=9).eval_interval == 7
    assert TrainConfig(num_envs=None, eval_interval=None) == TrainConfig()  # type: ignore[arg-type]


def test_what_was_computed_is_stored_and_then_stays() -> None:
    stored = TrainConfig(total_timesteps=30_000).to_dict()
    again = config_from_mapping(stored).with_overrides(total_timesteps=60_000)
    assert (again.num_envs, again.eval_interval) == (8, 3_000)
    assert type(stored["eval_interval"]) is int
