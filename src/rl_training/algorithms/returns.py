"""Returns and advantages of a rollout: GAE, n-step returns, TD(lambda) and V-trace.

All functions take the same tensors, time first, for T steps of N environments:

- ``rewards``, ``values`` (T, N): r_t and V(s_t).
- ``dones`` (T, N), bool or 0 and 1: whether the episode ended with the action at t, by termination
  or by truncation.
- ``bootstrap`` (T, N): the value of the true final observation where the episode was truncated with
  the action at t, else 0. Where a step was both terminated and truncated it is 0.
- ``last_value`` (N,): the value of the observation after the last step. It is not used where the
  last step ended the episode.

All estimators use one rule for what follows a step (`_backup`): for any estimate X,

    r_t + gamma [(1 - done_t) X_{t+1} + bootstrap_t],    X_T = last_value

so the value after a termination is 0, after a truncation that of the final observation, and no
estimate depends on rewards or values of the next episode.

Reset-only rows (``valid`` is False in `VectorStep` and `RolloutBuffer`) need no argument here. The
row before one has ``done = 1`` (or is reset-only, or in the rollout before), so rows of the episode
before do not depend on it. Results in reset-only rows have no meaning and no weight in losses.
Their inputs must be finite, because 0 * nan is nan.

Results are targets: no gradient flows through them.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

        delta_t = r_t + gamma [(1 - done_t) V_{t+1} + bootstrap_t] - V_t
        A_t     = delta_t + gamma lambda (1 - done_t) A_{t+1},    A_T = 0
        returns = A + V

    With ``gae_lambda = 1`` the advantage is the discounted return minus the value; with 0 it is the
    one-step TD error.

    Args:
        rewards: (T, N).
        values: (T, N).
        dones: (T, N).
        bootstrap: (T, N).
        last_value: (N,).
        gamma: the discount.
        gae_lambda: lambda.
        out: two tensors (T, N) that the advantages and the returns are written to; without it they
            are allocated.

    Returns:
        Advantages and returns, both (T, N).

    Raises:
        ValueError: shapes do not match.
    """
    _check_shapes(last_value, rewards=rewards, values=values, dones=dones, bootstrap=bootstrap)
    continues = _continues(dones, values)
    delta = _backup(rewards, _next(values, last_value), continues, bootstrap, gamma) - values
    decay = gamma * gae_lambda * continues
    if out is None:
        out = torch.empty_like(delta), torch.empty_like(delta)
    else:
        _check_shapes(last_value, rewards=rewards, advantages=out[0], returns=out[1])
    advantages, returns = out
    _accumulate(delta, decay, advantages)
    torch.add(advantages, values, out=returns)
    return advantages, returns


@torch.no_grad()
def gae_of_turns(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    acted: Tensor,
    waiting: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gae` where agents act one after another, each in a column of its own.

    The transition of an action lasts until the agent's next turn: its reward is the sum of what the
    agent receives until then, without discount, and it ends the episode if one of these steps does.
    The last transition of an agent that waits for its turn (``waiting``) is not complete: it is not
    learnt from, and the one before it is followed by the value of its observation.

    Args:
        rewards: (T, N).
        values: (T, N), of meaning where the agent acted.
        dones: (T, N).
        bootstrap: (T, N).
        last_value: (N,).
        acted: (T, N), bool: whether the agent acted in this step.
        waiting: (N,), bool: whether the agent does not act in the step after the last one, although
            its episode goes on.
        gamma: the discount.
        gae_lambda: lambda.

    Returns:
        Advantages and returns, both (T, N) and 0 where an agent did not act, and which steps are
        learnt from, (T, N).

    Raises:
        ValueError: shapes do not match.
    """
    _check_shapes(
        last_value, rewards=rewards, values=values, dones=dones, bootstrap=bootstrap, acted=acted
    )
    count = acted.sum(0)
    turn = acted.cumsum(0) - 1  # the turn that a step belongs to; -1: one of the rollout before
    place = turn.clamp(min=0)

    def packed(steps: Tensor, where: Tensor) -> Tensor:
        """The sum of the steps of each turn, turns from the top, with one row more."""
        sums = steps.new_zeros((len(steps) + 1, steps.shape[1]))
        return sums.scatter_add_(0, place, steps.where(where, steps.new_zeros(())))

    ends_before = dones.cumsum(0) - dones
    since = ends_before - packed(ends_before, acted).gather(0, place)
    belongs = (turn >= 0) & (since == 0)  # an episode may begin before the agent's first turn
    reward, bootstraps = packed(rewards, belongs), packed(bootstrap, belongs)
    done = packed(dones.to(values.dtype), belongs).clamp(max=1)
    value = packed(values, acted)

    column = torch.arange(acted.shape[1], device=acted.device)
    last = (count - 1).clamp(min=0)
    is_open = waiting & (count > 0) & (done[last, column] == 0)
    end = torch.where(is_open, last, count)  # where the complete transitions of a column end
    following = torch.where(is_open, value[last, column], last_value)
    # A row whose advantage is 0 and whose value is that after the last complete transition.
    value[end, column] = reward[end, column] = following
    done[end, column] = 1
    bootstraps[end, column] = 0
    advantage, ret = gae(
        reward,
        value,
        done,
        bootstraps,
        torch.zeros_like(last_value),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    learnt = acted & (turn < end)
    nothing = values.new_zeros(())
    return (
        advantage.gather(0, place).where(learnt, nothing),
        ret.gather(0, place).where(learnt, nothing),
        learnt,
    )


@torch.no_grad()
def n_step_returns(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    n: int,
) -> Tensor:
    """N-step returns: discounted rewards of up to ``n`` steps plus the value after them.

    Sutton and Barto 2018, section 7.1; Mnih et al. 2016, arXiv:1602.01783. In an episode that does
    not end within the next n steps of the rollout

        G_t = r_t + gamma r_{t+1} + ... + gamma^{n-1} r_{t+n-1} + gamma^n V_{t+n}

    The sum has fewer terms if the episode ends first; it is then followed by ``bootstrap`` (0 after
    a termination). At the end of the rollout it is followed by ``last_value``. Takes min(n, T)
    operations on whole tensors.

    Args:
        rewards: (T, N).
        values: (T, N).
        dones: (T, N).
        bootstrap: (T, N).
        last_value: (N,).
        gamma: the discount.
        n: the number of rewards, at least 1.

    Returns:
        G, (T, N).

    Raises:
        ValueError: shapes do not match, or ``n`` is less than 1.
    """
    _check_shapes(last_value, rewards=rewards, values=values, dones=dones, bootstrap=bootstrap)
    if n < 1:
        raise ValueError(f"n must be at least 1 step; got {n}")
    continues = _continues(dones, values)
    returns = values
    for _ in range(min(n, len(rewards))):
        # From the returns of k steps to those of k + 1.
        returns = _backup(rewards, _next(returns, last_value), continues, bootstrap, gamma)
    return returns


def lambda_returns(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """TD(lambda) returns (Sutton and Barto 2018, section 12.1).

        G_t = r_t + gamma [(1 - done_t) ((1 - lambda) V_{t+1} + lambda G_{t+1}) + bootstrap_t]
        G_T = last_value

    The mean of all n-step returns, weighted by (1 - lambda) lambda^{n-1}. Lambda 0 gives the
    one-step target; lambda 1 the discounted sum of rewards to the end of the episode or rollout,
    plus the value after it. G_t - V_t is the advantage of `gae` and is computed that way: the
    result equals the returns of `gae` bit for bit.

    Args:
        rewards: (T, N).
        values: (T, N).
        dones: (T, N).
        bootstrap: (T, N).
        last_value: (N,).
        gamma: the discount.
        gae_lambda: lambda.

    Returns:
        G, (T, N).

    Raises:
        ValueError: shapes do not match.
    """
    _, returns = gae(
        rewards, values, dones, bootstrap, last_value, gamma=gamma, gae_lambda=gae_lambda
    )
    return returns


@torch.no_grad()
def vtrace(
    behaviour_logprobs: Tensor,
    target_logprobs: Tensor,
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    gae_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, arXiv:1802.01561).

        ratio_t = exp(target_logprob_t - behaviour_logprob_t)
        rho_t   = min(ratio_t, rho_bar),    c_t = lambda min(ratio_t, c_bar)
        delta_t = r_t + gamma [(1 - done_t) V_{t+1} + bootstrap_t] - V_t
        vs_t    = V_t + rho_t delta_t + gamma c_t (1 - done_t) (vs_{t+1} - V_{t+1})
        A_t     = rho_t (r_t + gamma [(1 - done_t) X_{t+1} + bootstrap_t] - V_t)
        X_t     = (1 - lambda) V_t + lambda vs_t,    vs_T = X_T = last_value

    The lambda in c is from the paper's remark 2; the paper's algorithm has lambda 1. The paper has
    X = vs, which is equal for lambda 1. For smaller lambda, X as above makes A equal the advantages
    of `gae` on policy: if all ratios are one and both clips at least 1, ``vs`` equals
    `lambda_returns` and A the advantages of `gae`, bit for bit.

    Args:
        behaviour_logprobs: (T, N), log-probabilities under the policy that chose the actions.
        target_logprobs: (T, N), those under the policy that is trained.
        rewards: (T, N).
        values: (T, N).
        dones: (T, N).
        bootstrap: (T, N).
        last_value: (N,).
        gamma: the discount.
        gae_lambda: lambda.
        rho_bar: the clip of the ratio that TD errors and advantages are multiplied by. It sets the
            policy that is evaluated, from the behaviour policy (near 0) to the target policy
            (infinity).
        c_bar: the clip of the ratios of the trace: how far TD errors propagate back. It does not
            change what ``vs`` converges to. The paper assumes c_bar <= rho_bar.

    Returns:
        ``vs``, the targets of the values, and A, the advantages of the policy gradient; both
        (T, N).

    Raises:
        ValueError: shapes do not match.
    """
    _check_shapes(
        last_value,
        rewards=rewards,
        behaviour_logprobs=behaviour_logprobs,
        target_logprobs=target_logprobs,
        values=values,
        dones=dones,
        bootstrap=bootstrap,
    )
    ratio = torch.exp(target_logprobs - behaviour_logprobs)
    rho = ratio.clamp(max=rho_bar)
    continues = _continues(dones, values)
    # As in `gae`, with factors that are exactly 1 where both policies agree.
    delta = _backup(rewards, _next(values, last_value), continues, bootstrap, gamma) - values
    decay = gamma * gae_lambda * continues
    corrections = torch.empty_like(delta)  # vs - V
    _accumulate(rho * delta, decay * ratio.clamp(max=c_bar), corrections)
    next_corrections = _next(corrections, torch.zeros_like(last_value))
    advantages = torch.empty_like(delta)
    rows = zip(advantages, delta, decay, next_corrections, strict=True)
    for slot, delta_t, decay_t, correction in rows:
        # Row by row as in `_accumulate`: an operation on all rows may round differently.
        torch.addcmul(delta_t, decay_t, correction, out=slot)
    return corrections + values, rho * advantages


def _backup(
    rewards: Tensor, next_values: Tensor, continues: Tensor, bootstrap: Tensor, gamma: float
) -> Tensor:
    """Return one-step targets with ``next_values`` as the estimate after each step."""
    return rewards + gamma * (continues * next_values + bootstrap)


def _continues(dones: Tensor, like: Tensor) -> Tensor:
    """Return 1 where the next row belongs to the same episode, else 0."""
    return 1.0 - dones.to(like.dtype)


def _next(rows: Tensor, last: Tensor) -> Tensor:
    """Return the row after each row; ``last`` follows the last one."""
    return torch.cat((rows[1:], last.reshape(1, -1).to(rows)))


def _accumulate(delta: Tensor, decay: Tensor, out: Tensor) -> None:
    """Write x_t = delta_t + decay_t x_{t+1} to ``out``, where x_T = 0."""
    x = torch.zeros_like(delta[0])
    rows = zip(
        reversed(out.unbind()), reversed(delta.unbind()), reversed(decay.unbind()), strict=True
    )
    for slot, delta_t, decay_t in rows:
        x = torch.addcmul(delta_t, decay_t, x, out=slot)


def _check_shapes(last_value: Tensor, *, rewards: Tensor, **others: Tensor) -> None:
    """Raise `ValueError` unless everything is (T, N) and ``last_value`` is (N,)."""
    shape = rewards.shape
    if len(shape) != 2 or shape[0] < 1:
        raise ValueError(
            f"rewards must be (steps, environments) with at least one step; got {tuple(shape)}"
        )
    for name, tensor in others.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} must have the shape of rewards, {tuple(shape)}; got {tuple(tensor.shape)}"
            )
    if last_value.shape != shape[1:]:
        raise ValueError(
            f"last_value must hold one value per environment, {tuple(shape[1:])}; "
            f"got {tuple(last_value.shape)}"
        )
