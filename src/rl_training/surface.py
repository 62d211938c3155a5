"""The managed class and the ``train_*`` function of every algorithm.

Generated from `rl_training.registry` by ``python scripts/generate_surface.py``: do not edit.
"""

from __future__ import annotations

from rl_training.api.algorithms import ManagedAlgorithm
from rl_training.api.recurrent import RecurrentAlgorithm
from rl_training.runtime.a2c_trainer import train_a2c
from rl_training.runtime.appo_trainer import train_appo
from rl_training.runtime.awac_trainer import train_awac
from rl_training.runtime.bc_trainer import train_bc
from rl_training.runtime.c51_trainer import train_c51
from rl_training.runtime.cql_trainer import train_cql
from rl_training.runtime.dqn_trainer import train_dqn
from rl_training.runtime.drqn_trainer import train_drqn
from rl_training.runtime.idqn_trainer import train_idqn
from rl_training.runtime.impala_trainer import train_impala
from rl_training.runtime.ippo_trainer import train_ippo
from rl_training.runtime.iql_trainer import train_iql
from rl_training.runtime.iqn_trainer import train_iqn
from rl_training.runtime.mappo_trainer import train_mappo
from rl_training.runtime.ppg_trainer import train_ppg
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.pqn_trainer import train_pqn
from rl_training.runtime.qmix_trainer import train_qmix
from rl_training.runtime.qrdqn_trainer import train_qrdqn
from rl_training.runtime.rebrac_trainer import train_rebrac
from rl_training.runtime.recurrent_ppo_trainer import train_recurrent_ppo
from rl_training.runtime.sac_discrete_trainer import train_sac_discrete
from rl_training.runtime.sac_trainer import train_sac
from rl_training.runtime.td3_bc_trainer import train_td3_bc
from rl_training.runtime.td3_trainer import train_td3
from rl_training.runtime.vdn_trainer import train_vdn

__all__ = [
    "A2C",
    "APPO",
    "AWAC",
    "BC",
    "C51",
    "CQL",
    "DQN",
    "DRQN",
    "IDQN",
    "IMPALA",
    "IPPO",
    "IQL",
    "IQN",
    "MAPPO",
    "PPG",
    "PPO",
    "PQN",
    "QMIX",
    "QRDQN",
    "SAC",
    "TD3",
    "TD3BC",
    "VDN",
    "ReBRAC",
    "RecurrentPPO",
    "SACDiscrete",
    "train_a2c",
    "train_appo",
    "train_awac",
    "train_bc",
    "train_c51",
    "train_cql",
    "train_dqn",
    "train_drqn",
    "train_idqn",
    "train_impala",
    "train_ippo",
    "train_iql",
    "train_iqn",
    "train_mappo",
    "train_ppg",
    "train_ppo",
    "train_pqn",
    "train_qmix",
    "train_qrdqn",
    "train_rebrac",
    "train_recurrent_ppo",
    "train_sac",
    "train_sac_discrete",
    "train_td3",
    "train_td3_bc",
    "train_vdn",
]


class A2C(ManagedAlgorithm):
    """Advantage actor-critic: ``A2C(TrainConfig(algo="a2c", ...)).learn()``."""

    algo = "a2c"


class APPO(ManagedAlgorithm):
    """PPO with V-trace: ``APPO(TrainConfig(algo="appo", ...)).learn()``."""

    algo = "appo"


class AWAC(ManagedAlgorithm):
    """Advantage-weighted actor-critic: ``AWAC(TrainConfig(algo="awac", ...)).learn()``."""

    algo = "awac"


class BC(ManagedAlgorithm):
    """Behavioural cloning: ``BC(TrainConfig(algo="bc", ...)).learn()``."""

    algo = "bc"


class C51(ManagedAlgorithm):
    """DQN of a categorical distribution: ``C51(TrainConfig(algo="c51", ...)).learn()``."""

    algo = "c51"


class CQL(ManagedAlgorithm):
    """Conservative Q-learning: ``CQL(TrainConfig(algo="cql", ...)).learn()``."""

    algo = "cql"


class DQN(ManagedAlgorithm):
    """Deep Q-learning: ``DQN(TrainConfig(algo="dqn", ...)).learn()``."""

    algo = "dqn"


class DRQN(RecurrentAlgorithm):
    """Deep recurrent Q-learning: ``DRQN(TrainConfig(algo="drqn", ...)).learn()``."""

    algo = "drqn"


class IDQN(ManagedAlgorithm):
    """DQN for several agents: ``IDQN(TrainConfig(algo="idqn", ...)).learn()``."""

    algo = "idqn"


class IMPALA(ManagedAlgorithm):
    """Actor-critic with V-trace: ``IMPALA(TrainConfig(algo="impala", ...)).learn()``."""

    algo = "impala"


class IPPO(ManagedAlgorithm):
    """PPO for several agents: ``IPPO(TrainConfig(algo="ippo", ...)).learn()``."""

    algo = "ippo"


class IQL(ManagedAlgorithm):
    """Implicit Q-learning: ``IQL(TrainConfig(algo="iql", ...)).learn()``."""

    algo = "iql"


class IQN(ManagedAlgorithm):
    """DQN of quantiles at random fractions: ``IQN(TrainConfig(algo="iqn", ...)).learn()``."""

    algo = "iqn"


class MAPPO(ManagedAlgorithm):
    """PPO for agents with a central critic: ``MAPPO(TrainConfig(algo="mappo", ...)).learn()``."""

    algo = "mappo"


class PPG(ManagedAlgorithm):
    """Phasic policy gradient: ``PPG(TrainConfig(algo="ppg", ...)).learn()``."""

    algo = "ppg"


class PPO(ManagedAlgorithm):
    """Proximal policy optimisation: ``PPO(TrainConfig(algo="ppo", ...)).learn()``."""

    algo = "ppo"


class PQN(ManagedAlgorithm):
    """Q-learning from rollouts: ``PQN(TrainConfig(algo="pqn", ...)).learn()``."""

    algo = "pqn"


class QMIX(ManagedAlgorithm):
    """Q-learning of a team with a mixer: ``QMIX(TrainConfig(algo="qmix", ...)).learn()``."""

    algo = "qmix"


class QRDQN(ManagedAlgorithm):
    """DQN of quantiles of returns: ``QRDQN(TrainConfig(algo="qrdqn", ...)).learn()``."""

    algo = "qrdqn"


class ReBRAC(ManagedAlgorithm):
    """Behaviour-regularised TD3: ``ReBRAC(TrainConfig(algo="rebrac", ...)).learn()``."""

    algo = "rebrac"


class RecurrentPPO(RecurrentAlgorithm):
    """PPO with memory: ``RecurrentPPO(TrainConfig(algo="recurrent_ppo", ...)).learn()``."""

    algo = "recurrent_ppo"


class SAC(ManagedAlgorithm):
    """Soft actor-critic: ``SAC(TrainConfig(algo="sac", ...)).learn()``."""

    algo = "sac"


class SACDiscrete(ManagedAlgorithm):
    """SAC for discrete actions: ``SACDiscrete(TrainConfig(algo="sac_discrete", ...)).learn()``."""

    algo = "sac_discrete"


class TD3(ManagedAlgorithm):
    """Twin delayed DDPG: ``TD3(TrainConfig(algo="td3", ...)).learn()``."""

    algo = "td3"


class TD3BC(ManagedAlgorithm):
    """TD3 with behavioural cloning: ``TD3BC(TrainConfig(algo="td3_bc", ...)).learn()``."""

    algo = "td3_bc"


class VDN(ManagedAlgorithm):
    """Q-learning of a team's sum of values: ``VDN(TrainConfig(algo="vdn", ...)).learn()``."""

    algo = "vdn"
