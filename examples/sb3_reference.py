"""Write what `rl-training import-sb3` compares a converted model with.

Run it where Stable-Baselines3 and the environment are installed; rl_training is not needed:

    python sb3_reference.py model.zip --algo ppo --env-id CartPole-v1 --out reference.npz

It plays the environment with random actions, and writes the observations (raw, before any
VecNormalize) and the deterministic actions that the model chooses for them, as arrays of numbers.
With --vecnormalize it also writes the statistics of a VecNormalize, for --vecnormalize there.
"""

import argparse

import gymnasium as gym
import numpy as np
import stable_baselines3
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, VecTransposeImage

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("model", help="the .zip that model.save wrote")
parser.add_argument("--algo", required=True, choices=["ppo", "a2c", "dqn", "sac", "td3"])
parser.add_argument("--env-id", required=True, help="id, or module:id as in ale_py:ALE/Pong-v5")
parser.add_argument("--out", required=True, help="the .npz to write")
parser.add_argument("--steps", type=int, default=256, help="number of observations")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--atari", action="store_true", help="AtariWrapper and four stacked frames")
parser.add_argument("--vecnormalize", help="the file that VecNormalize.save wrote, if any")
parser.add_argument("--statistics", help="the .npz to write with its statistics")
args = parser.parse_args()

if args.atari:
    env = VecTransposeImage(VecFrameStack(make_atari_env(args.env_id, seed=args.seed), 4))
else:
    env = make_vec_env(args.env_id, seed=args.seed)
model = getattr(stable_baselines3, args.algo.upper()).load(args.model, device="cpu")

normalizer = VecNormalize.load(args.vecnormalize, env) if args.vecnormalize else None
if normalizer is not None and not normalizer.norm_obs:
    normalizer = None  # it only scales rewards, which acting does not depend on

env.action_space.seed(args.seed)
observations, actions = [], []
obs = env.reset()
for _ in range(args.steps):
    observations.append(obs[0].copy())
    seen = obs if normalizer is None else normalizer.normalize_obs(obs)
    action, _ = model.predict(seen, deterministic=True)
    actions.append(action[0])
    obs, *_ = env.step(np.array([env.action_space.sample()]))
np.savez(args.out, observations=np.stack(observations), actions=np.stack(actions))
print(f"wrote {args.out}: {args.steps} observations of {gym.spaces.flatdim(env.observation_space)}")

if normalizer is not None and args.statistics:
    np.savez(
        args.statistics,
        mean=normalizer.obs_rms.mean,
        var=normalizer.obs_rms.var,
        count=normalizer.obs_rms.count,
        clip_obs=normalizer.clip_obs,
        epsilon=normalizer.epsilon,
    )
    print(f"wrote {args.statistics}")
