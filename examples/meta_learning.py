"""Meta-learning through clipped gradients: a start from which one robust step learns to tell two digits apart.

MAML (Finn, Abbeel and Levine 2017, arXiv 1703.03400) differentiates the loss after a step of training with respect to the
parameters before it. Here the step is a clipped sum, so no single example decides it, and `create_graph=True` makes that
sum, norms included, a differentiable function of the parameters. Which digit is called 0 is drawn for each task, so it
can only be learned from the task's own examples; the images of the tasks that are judged were never seen.
"""

from __future__ import annotations

from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from training import Params, train_and_test

import pexgrad

Task = tuple[Tensor, Tensor, Tensor, Tensor]  # x, y to learn from; x, y to be judged by


def draw(x: Tensor, y: Tensor, digits: tuple[int, int], shots: int, generator: torch.Generator) -> Task:
    """Examples of two digits, labelled 0 and 1 by chance: `shots` of each to learn from, 15 of each to be judged by."""
    parts = []
    for i in torch.randperm(
        2, generator=generator
    ).tolist():  # else a fixed answer for each digit is all it takes
        digit = digits[i]
        of_digit = x[y == digit]
        parts.append(of_digit[torch.randperm(len(of_digit), generator=generator)[: shots + 15]])
    label = torch.tensor([0, 1])
    learn, judge = torch.cat([p[:shots] for p in parts]), torch.cat([p[shots:] for p in parts])
    return learn, label.repeat_interleave(shots), judge, label.repeat_interleave(15)


def main(steps: int = 150, shots: int = 1, lr: float = 0.5) -> tuple[float, float]:
    """Print the accuracy on unseen images after one step, from a random start and from the learned one; return both."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = train_and_test()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2))
    clipped_grad = pexgrad.clipped_grad(model, max_norm=2.0, create_graph=True)

    tasks = list(combinations(range(10), 2))

    def adapted(params: Params, x: Tensor, y: Tensor) -> Params:
        total = clipped_grad(params, x, y).grads
        return {name: p - lr * total[name] / len(y) for name, p in params.items()}

    def accuracy(params: Params) -> float:
        right, generator = [], torch.Generator().manual_seed(1)
        for digits in tasks:
            for _ in range(10):
                x, y, x_judge, y_judge = draw(test.x, test.y, digits, shots, generator)
                outputs = functional_call(model, adapted(params, x, y), (x_judge,))
                right.append((outputs.argmax(1) == y_judge).float().mean())
        return torch.stack(right).mean().item()

    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    before = accuracy(params)
    optimiser = torch.optim.Adam(params.values(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss = torch.zeros(())
        for i in torch.randperm(len(tasks), generator=generator)[:4].tolist():
            x, y, x_judge, y_judge = draw(train.x, train.y, tasks[i], shots, generator)
            loss = loss + F.cross_entropy(functional_call(model, adapted(params, x, y), (x_judge,)), y_judge)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = accuracy(params)
    print(
        f"one step on {2 * shots} examples, accuracy on images never seen: {before:.1%} from a random start, ",
        end="",
    )
    print(f"{after:.1%} from the learned one")
    return before, after


if __name__ == "__main__":
    main()
