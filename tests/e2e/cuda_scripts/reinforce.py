"""REINFORCE on a pole that is to be balanced: actions are drawn on the device, one at a time."""

import math

import torch
from torch import nn, optim
from torch.distributions import Categorical

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(543)


class Pole:
    """A pole on a cart, in steps of 0.02 s."""

    def reset(self):
        self.state = [0.01, 0.0, 0.02, 0.0]
        return self.state

    def step(self, action):
        x, speed, angle, turning = self.state
        force, mass, length = (10.0 if action else -10.0), 1.1, 0.5
        push = (force + 0.05 * turning**2 * math.sin(angle)) / mass
        bend = 9.8 * math.sin(angle) - math.cos(angle) * push
        acceleration = bend / (length * (4 / 3 - 0.1 * math.cos(angle) ** 2 / mass))
        moved = push - 0.05 * acceleration * math.cos(angle) / mass
        self.state = [x + 0.02 * speed, speed + 0.02 * moved, angle + 0.02 * turning, turning + 0.02 * acceleration]
        return self.state, 1.0, abs(self.state[2]) > 0.2 or abs(self.state[0]) > 2.4


policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(dim=1)).to(device)
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
pole = Pole()
for episode in range(3):
    torch.manual_seed(episode)
    state, log_probs, rewards, done = pole.reset(), [], [], False
    while not done and len(rewards) < 40:
        choices = Categorical(policy(torch.tensor(state, device=device).float().unsqueeze(0)))
        action = choices.sample()
        log_probs.append(choices.log_prob(action))
        state, reward, done = pole.step(action.item())
        rewards.append(reward)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns = torch.tensor(returns, device=device)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    optimizer.zero_grad()
    loss = torch.cat([-log_prob * value for log_prob, value in zip(log_probs, returns, strict=True)]).sum()
    loss.backward()
    optimizer.step()
    print(episode, len(rewards), loss.item())
