"""``benchmarks/league/baselines``: each step is the formula of its paper, computed slowly here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.league.baselines import SOAP, Muon, MuonH, NorMuon, ScheduleFreeAdamW, adamw

LR, REST_LR, DECAY = 0.02, 0.03, 0.5
NAMES = {adamw: "adamw", Muon: "muon", MuonH: "muonh", NorMuon: "normuon", SOAP: "soap"}
ALL = [*NAMES, ScheduleFreeAdamW]


class Net(nn.Module):
    """Layers of all kinds, with square kernels and with tall and wide ones."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 9, 3, padding=1)
        self.rnn = nn.RNN(9, 5, batch_first=True)
        self.hidden, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.unused = nn.Linear(3, 4)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        x = self.conv(self.embedding(tokens).mT).mT
        return self.head(self.norm(self.hidden(self.rnn(x)[0]).relu()))


def kind(name, p):
    """What an optimizer takes a parameter for."""
    if p.dim() == 1:
        return "vector"
    layer = name.partition(".")[0]
    return layer if layer in ("embedding", "head") else "hidden"


def orthogonal(m):
    """Five steps of the quintic polynomial, on the singular values."""
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ vh


def nesterov(g, past, beta=0.95):
    """Of all gradients so far: momentum as a sum."""
    total = sum(beta ** (len(past) - 1 - k) * old for k, old in enumerate(past))
    return g + beta * total


def adam(past, beta1, beta2, eps):
    t = len(past)
    mean = sum((1 - beta1) * beta1 ** (t - 1 - k) * g for k, g in enumerate(past)) / (1 - beta1**t)
    square = sum((1 - beta2) * beta2 ** (t - 1 - k) * g**2 for k, g in enumerate(past)) / (1 - beta2**t)
    return mean / (square.sqrt() + eps)


def adamw_step(w, past, lr, decay, betas=(0.9, 0.95), eps=1e-10):
    return w - lr * decay * w - lr * adam(past, *betas, eps)


def muon_step(w, past):
    return w - LR * DECAY * w - LR * 0.2 * max(w.shape) ** 0.5 * orthogonal(nesterov(past[-1], past))


def normuon_step(w, past):
    rows = torch.zeros(len(w))
    for t in range(1, len(past) + 1):
        o = orthogonal(nesterov(past[t - 1], past[:t]))
        rows = 0.95 * rows + 0.05 * torch.stack([row.square().mean() for row in o])
    o = torch.stack([row / v.sqrt() for row, v in zip(o, rows, strict=True)])
    return w - LR * DECAY * w - LR * 0.2 * w.numel() ** 0.5 * o / o.norm()


def on_sphere(w, start, u):
    w = w / start.norm() - LR * u / u.norm()
    return start.norm() * w / w.norm()


RULES = {
    "adamw": lambda kind, w, start, past: adamw_step(
        w, past, LR, 0.0 if kind == "vector" else DECAY, (0.9, 0.999), 1e-8
    ),
    "muon": lambda kind, w, start, past: (
        muon_step(w, past) if kind == "hidden"
        else adamw_step(w, past, REST_LR, 0.0 if kind == "vector" else DECAY)
    ),
    "normuon": lambda kind, w, start, past: (
        normuon_step(w, past) if kind == "hidden"
        else adamw_step(w, past, REST_LR, 0.0 if kind == "vector" else DECAY)
    ),
    "muonh": lambda kind, w, start, past: (
        on_sphere(w, start, orthogonal(nesterov(past[-1], past))) if kind == "hidden"
        else on_sphere(w, start, adam(past, 0.9, 0.95, 1e-8)) if kind == "head"
        else adamw_step(w, past, REST_LR, 0.0, eps=1e-8)
    ),
}  # fmt: skip


def make(optimizer, model):
    rest = {"rest_lr": REST_LR} if optimizer in (Muon, NorMuon, MuonH) else {}
    decay = {} if optimizer is MuonH else {"weight_decay": DECAY}
    return optimizer(model, lr=LR, **rest, **decay)


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def set_gradients(model):
    for name, p in model.named_parameters():
        p.grad = None if name.startswith("unused") else torch.randn_like(p)


@pytest.mark.parametrize("optimizer", [adamw, Muon, NorMuon, MuonH], ids=NAMES.get)
def test_steps_are_the_formulas(optimizer):
    model = Net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected, past = dict(start), {name: [] for name in start}
    used = make(optimizer, model)
    for _ in range(8):
        set_gradients(model)
        used.step()
        for name, p in model.named_parameters():
            if p.grad is not None:
                past[name].append(p.grad.flatten(1) if p.dim() > 1 else p.grad)
                matrix = [w.flatten(1) if p.dim() > 1 else w for w in (expected[name], start[name])]
                new = RULES[NAMES[optimizer]](kind(name, p), *matrix, past[name])
                expected[name] = new.view_as(p)
            # orthogonalize adds 1e-7 to norms
            torch.testing.assert_close(p.detach(), expected[name], rtol=1e-6, atol=1e-6)


def test_muon_is_that_of_torch():
    """As far as bfloat16 goes, in which torch orthogonalises on a CPU as well."""
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 9), nn.Linear(9, 4)).float()
    other = copy.deepcopy(model)
    ours = Muon(model, LR, weight_decay=DECAY)
    theirs = torch.optim.Muon(
        [other[0].weight, other[1].weight], LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(10):
        set_gradients(model)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        before = [layer.weight.detach().clone() for layer in other[:2]]
        theirs.step()
        ours.step()
        for layer, same, old in zip(model[:2], other[:2], before, strict=True):
            assert (layer.weight - same.weight).norm() < 0.05 * (same.weight - old).norm()
            layer.weight.data.copy_(same.weight)


def test_soap_is_adam_in_the_eigenbasis():
    """One Kronecker product turns the whole matrix; a side longer than 6 is not turned."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Conv1d(2, 4, 2), nn.Linear(7, 4), nn.Embedding(9, 8))
    used = SOAP(model, LR, DECAY, longest=6)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    slow = [Turned(p.detach().clone().flatten(1), longest=6) for p in matrices]
    for _ in range(25):
        set_gradients(model)
        used.step()
        for p, same in zip(matrices, slow, strict=True):
            same.step(p.grad.flatten(1))
            torch.testing.assert_close(p.detach().flatten(1), same.w, rtol=1e-6, atol=1e-8)


class Turned:
    def __init__(self, w, longest):
        self.w, self.longest, self.t = w, longest, -1
        self.mean, self.square, self.grams = torch.zeros(w.numel()), torch.zeros(w.numel()), [0.0, 0.0]

    def step(self, g):
        self.t += 1
        if self.t:
            turn = torch.kron(*(q.contiguous() for q in self.bases))  # of row-major vectors
            self.mean = 0.95 * self.mean + 0.05 * g.flatten()
            self.square = 0.95 * self.square + 0.05 * (turn.T @ g.flatten()) ** 2
            mean, square = self.mean / (1 - 0.95**self.t), self.square / (1 - 0.95**self.t)
            update = turn @ ((turn.T @ mean) / (square.sqrt() + 1e-8 / (1 - 0.95**self.t) ** 0.5))
            self.w = (1 - LR * DECAY) * (self.w - LR * update.view_as(g))
        self.grams = [
            0.95 * old + 0.05 * new for old, new in zip(self.grams, (g @ g.T, g.T @ g), strict=True)
        ]
        if not self.t:
            self.bases = [torch.linalg.eigh(gram)[1].flip(1) for gram in self.grams]
            self.bases = [q if len(q) <= self.longest else torch.eye(len(q)) for q in self.bases]
        elif self.t % 10 == 0:
            square = self.square.view_as(g)
            for side, (gram, q) in enumerate(zip(self.grams, self.bases, strict=True)):
                if len(q) <= self.longest:
                    order = torch.argsort(-(q.T @ gram @ q).diagonal())
                    square = square[order] if side == 0 else square[:, order]
                    self.bases[side] = torch.linalg.qr(gram @ q[:, order])[0]
            self.square = square.flatten()


@pytest.mark.parametrize("warmup", [0, 5])
def test_schedule_free_keeps_three_sequences(warmup):
    model = Net()
    used = ScheduleFreeAdamW(model, LR, DECAY, warmup_steps=warmup)
    slow = {name: [p.detach().clone()] * 2 for name, p in model.named_parameters()}
    past, total = {name: [] for name in slow}, 0.0
    for t in range(1, 11):
        set_gradients(model)
        used.step()
        rate = LR * min(1, t / max(1, warmup))
        total += rate**2
        for name, p in model.named_parameters():
            x, z = slow[name]
            if p.grad is not None:
                past[name].append(p.grad)
                square = sum(0.001 * 0.999 ** (t - 1 - k) * g**2 for k, g in enumerate(past[name]))
                y = 0.1 * z + 0.9 * x
                decay = DECAY * y if p.dim() > 1 else 0
                z = z - rate * (p.grad / ((square / (1 - 0.999**t)).sqrt() + 1e-8) + decay)
                x = (1 - rate**2 / total) * x + rate**2 / total * z
                slow[name] = [x, z]
            torch.testing.assert_close(p.detach(), 0.1 * z + 0.9 * x, rtol=1e-5, atol=1e-6)
    used.eval()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), slow[name][0], rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="train"):
        used.step()
    used.train()
    used.step()


@pytest.mark.parametrize("optimizer", ALL, ids=lambda made: made.__name__)
def test_trains_at_a_rate_in_a_tensor(optimizer):
    model = Net().float()
    used = optimizer(model)
    for group in used.param_groups:
        group["lr"] = torch.tensor(0.01)
    tokens = torch.randint(7, (16, 9))
    losses = []
    for _ in range(40):
        used.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        used.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert not model.unused.weight.grad


def test_a_tied_head_takes_adam():
    model = Net()
    model.head = nn.Linear(6, 7)
    model.head.weight = model.embedding.weight
    norm = model.head.weight.norm().item()
    used = MuonH(model, LR)
    set_gradients(model)
    used.step()
    assert model.head.weight.norm().item() != pytest.approx(norm, abs=1e-9)
