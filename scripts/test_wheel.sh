#!/bin/sh
# Builds a wheel and trains from it in a truly empty environment, in another directory.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
cp -a src configs zoo pyproject.toml README.md LICENSE "$work/source"
"$PIP" wheel --quiet --disable-pip-version-check --no-deps -w "$work" "$work/source"
"$PYTHON" -m venv "$work/venv"
# torch first and pinned, as in the Makefile.
"$work/venv/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt torch
"$work/venv/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt "$work"/rl_training-*.whl
mkdir "$work/elsewhere"
cd "$work/elsewhere"
"$work/venv/bin/rl-training" train ppo/cartpole --total-timesteps 5000
test -f runs/*/checkpoints/last.pt
"$work/venv/bin/rl-training" zoo list classic
echo "the wheel trains from an empty environment"
