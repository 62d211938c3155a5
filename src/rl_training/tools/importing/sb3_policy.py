"""What a model of Stable-Baselines3 is: its algorithm, and the options of its policy."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rl_training.errors import UserError
from rl_training.stored_zip import quote
from rl_training.tools.importing.sb3_file import SavedModel

ON_POLICY = ("ppo", "a2c")
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "GELU": "gelu", "SiLU": "silu"}
"""Names of torch and of this package."""
_CLASS = re.compile(r"<class '([\w.]+)'>")
_EXTRACTORS = {
    "stable_baselines3.common.torch_layers.NatureCNN",
    "stable_baselines3.common.torch_layers.FlattenExtractor",
}


def algorithm_of(model: SavedModel) -> str:
    """Return the name of a model's algorithm here.

    Raises:
        UserError: It has no counterpart, or its policy is not one of Stable-Baselines3.
    """
    names, data = model.weights.keys(), model.data
    described = data.get("policy_class")
    module = described.get("__module__") if isinstance(described, Mapping) else None
    if not isinstance(module, str) or not module.startswith("stable_baselines3."):
        raise UserError(
            f"{model.path} has a policy of {quote(str(module))}, and only those of"
            " Stable-Baselines3 itself can be imported"
        )
    if data.get("use_sde") is not False:
        raise UserError(f"{model.path} uses state-dependent exploration (use_sde)")
    if "cg_max_steps" in data:  # of sb3_contrib, with the policy of PPO and A2C
        raise UserError(f"{model.path} is of TRPO, which cannot be imported")
    found = {
        "sac": "actor.latent_pi.0.weight" in names or "actor.log_std.weight" in names,
        "td3": "actor.mu.0.weight" in names,
        "dqn": any(name.startswith("q_net.q_net.") for name in names),
        "ppo": "action_net.weight" in names and "n_epochs" in data,
        "a2c": "action_net.weight" in names,
    }
    for algo, there in found.items():
        if there:
            return algo
    raise UserError(
        f"{model.path} is of no algorithm that can be imported: PPO, A2C, DQN, SAC, TD3"
    )


def check_policy_kwargs(model: SavedModel) -> None:
    """Raise UserError for options of a policy that change what its weights compute."""
    given = model.policy_kwargs
    if given.get("normalize_images", True) is not True:
        raise UserError(f"{model.path} was trained with normalize_images=False")
    extractor = given.get("features_extractor_class")
    if extractor is None:
        return
    named = _CLASS.fullmatch(extractor) if isinstance(extractor, str) else None
    if named is None or named[1] not in _EXTRACTORS:
        raise UserError(
            f"{model.path} has the features extractor {quote(str(extractor))}, which cannot be"
            " imported"
        )


def activation_of(model: SavedModel, algo: str) -> str:
    """Return the activation of a model's networks; that of its encoder is always ReLU."""
    given = model.policy_kwargs.get("activation_fn")
    if given is None:
        return "tanh" if algo in ON_POLICY else "relu"
    named = _CLASS.fullmatch(given) if isinstance(given, str) else None
    module, _, name = named[1].rpartition(".") if named else ("", "", "")
    if module != "torch.nn.modules.activation" or name not in ACTIVATIONS:
        raise UserError(
            f"{model.path} has the activation {quote(str(given))}; those that can be imported are"
            f" {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
