"""Digits with a convolutional network whose linear layers run in FP8. Written for TransformerEngine; it knows nothing of Ottava.

    python -m ottava.compat examples/te_mnist.py --use-fp8

The images are made here, so nothing is downloaded: ten seven-segment digits of 28x28 pixels, moved about and covered in noise.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformer_engine import pytorch as te

# Segments of a seven-segment display: (top, left, height, width) in a box of 18 x 12 pixels.
SEGMENTS = ((0, 0, 2, 12), (0, 0, 9, 2), (0, 10, 9, 2), (8, 0, 2, 12), (9, 0, 9, 2), (9, 10, 9, 2), (16, 0, 2, 12))
LIT = ("012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356")  # of the digits 0 to 9


def make_digits(count, seed):
    """images [count, 1, 28, 28] and labels [count]."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = torch.zeros(10, 18, 12)
    for digit, segments in enumerate(LIT):
        for top, left, height, width in (SEGMENTS[int(s)] for s in segments):
            glyphs[digit, top : top + height, left : left + width] = 1.0
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels):
        top = int(torch.randint(4, 7, (1,), generator=generator))
        left = int(torch.randint(6, 11, (1,), generator=generator))
        image[0, top : top + 18, left : left + 12] += glyphs[label]
    return images, labels


class Net(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, device=device)  # 28 -> 13
        self.fc1 = te.Linear(8 * 6 * 6, 128, device=device)  # pooled to 6 x 6; FP8 takes multiples of 16
        self.fc2 = te.Linear(128, 16, device=device)
        self.fc3 = nn.Linear(16, 10, device=device)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc3(F.relu(self.fc2(x)))


def train(model, optimizer, images, labels, batch_size, use_fp8):
    model.train()
    for batch in torch.randperm(len(images), device=images.device).split(batch_size):
        optimizer.zero_grad()
        with te.autocast(enabled=use_fp8):
            output = model(images[batch])
        loss = F.cross_entropy(output, labels[batch])
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def calibrate(model, images, batch_size):
    """Collects the statistics of FP8 while computing in high precision."""
    model.eval()
    for batch in images.split(batch_size):
        with te.autocast(enabled=False, calibrating=True):
            model(batch)


@torch.no_grad()
def accuracy(model, images, labels, batch_size, use_fp8):
    model.eval()
    correct = 0
    for batch, target in zip(images.split(batch_size), labels.split(batch_size)):
        with te.autocast(enabled=use_fp8):
            correct += (model(batch).argmax(dim=1) == target).sum().item()
    return correct / len(images)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="a multiple of 16")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--use-fp8", action="store_true", help="train and test in FP8")
    parser.add_argument("--use-fp8-infer", action="store_true", help="train in high precision, calibrate, test in FP8")
    parser.add_argument("--accuracy", type=float, default=0.9, help="fail below this")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = (t.to(device) for t in make_digits(args.samples, seed=2))
    test_images, test_labels = (t.to(device) for t in make_digits(512, seed=3))

    model = Net(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        loss = train(model, optimizer, images, labels, args.batch_size, args.use_fp8)
        reached = accuracy(model, test_images, test_labels, args.batch_size, args.use_fp8)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {reached:.1%}")

    if args.use_fp8_infer:
        if not args.use_fp8:
            calibrate(model, images, args.batch_size)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "mnist.pt"
            torch.save(model.state_dict(), file)
            model = Net(device)
            model.load_state_dict(torch.load(file))
        reached = accuracy(model, test_images, test_labels, args.batch_size, use_fp8=True)
        print(f"reloaded, in FP8: accuracy {reached:.1%}")

    assert reached >= args.accuracy, f"accuracy {reached:.1%} is below {args.accuracy:.1%}"


if __name__ == "__main__":
    main()
