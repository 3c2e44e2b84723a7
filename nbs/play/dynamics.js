// The arithmetic of the playground: coupled query-key dynamics, as the library has them, in plain JavaScript.
// Names and order of operations are those of coupled_qk.coupling and coupled_qk.integrators;
// tests/test_playground.py holds every function here to the library's answers.
// A token's query or key is an array of d numbers; q and k of all tokens are arrays of such arrays.

const plus = (x, s, y) => x.map((v, i) => v + s * y[i]); // x + s y
const dot = (x, y) => x.reduce((sum, v, i) => sum + v * y[i], 0);
const silu = x => x / (1 + Math.exp(-x));
const linear = (W, b) => x => W.map((row, i) => dot(row, x) + b[i]);

// Forces f(q) of one token. They need only its own q: no token looks at another.
export function makeForces({ network, landscape }) {
  const hidden = linear(network["hidden.weight"], network["hidden.bias"]);
  const out = linear(network["out.weight"], network["out.bias"]);
  const W = landscape["hidden.weight"];
  const slope = linear(W, landscape["hidden.bias"]);
  return {
    none: q => q.map(() => 0),
    spring: q => q.map(x => -x),
    pendulum: q => q.map(x => -Math.sin(x)),
    bent: ([x, y]) => [Math.tanh(2 * y), Math.tanh(2 * x)],
    swirl: ([x, y]) => [-y, x],
    network: q => out(hidden(q).map(silu)),
    landscape: q => { // -W^T silu(W q + b)
      const h = slope(q).map(silu);
      return q.map((_, j) => -dot(h, W.map(row => row[j])));
    },
  };
}

// The energy that the true path keeps, where it has a short formula.
const half = x => dot(x, x) / 2;
export const energies = {
  none: (q, k) => half(k),
  spring: (q, k) => half(k) + half(q),
  pendulum: (q, k) => half(k) - q.reduce((sum, x) => sum + Math.cos(x), 0),
};

// One step of one token. A drift moves q by k, a kick moves k by f(q).
export const integrators = {
  euler: (q, k, f, dt) => [plus(q, dt, k), plus(k, dt, f(q))], // both from the old state
  symplectic_euler(q, k, f, dt) {
    k = plus(k, dt, f(q)); // kick, then drift with the new key
    return [plus(q, dt, k), k];
  },
  leapfrog(q, k, f, dt) {
    k = plus(k, dt / 2, f(q));
    q = plus(q, dt, k);
    return [q, plus(k, dt / 2, f(q))];
  },
  leapfrog_dkd(q, k, f, dt) {
    q = plus(q, dt / 2, k);
    k = plus(k, dt, f(q));
    return [plus(q, dt / 2, k), k];
  },
  rk4(q, k, f, dt) {
    const q1 = k, k1 = f(q);
    const q2 = plus(k, dt / 2, k1), k2 = f(plus(q, dt / 2, q1));
    const q3 = plus(k, dt / 2, k2), k3 = f(plus(q, dt / 2, q2));
    const q4 = plus(k, dt, k3), k4 = f(plus(q, dt, q3));
    const mean = (a, b, c, d) => a.map((x, i) => x + 2 * b[i] + 2 * c[i] + d[i]);
    return [plus(q, dt / 6, mean(q1, q2, q3, q4)), plus(k, dt / 6, mean(k1, k2, k3, k4))];
  },
};

// The n + 1 states [q, k] of one token on its way.
export function trail(step, q, k, f, dt, n) {
  const states = [[q, k]];
  for (let i = 0; i < n; i++) states.push(step(...states[i], f, dt));
  return states;
}

// Where all tokens end.
export function evolve(step, q, k, f, dt, n) {
  const ends = q.map((_, i) => trail(step, q[i], k[i], f, dt, n)[n]);
  return { q: ends.map(end => end[0]), k: ends.map(end => end[1]) };
}

export const products = (q, k) => q.map(a => k.map(b => dot(a, b))); // q_i . k_j, before the root of d

// Softmax attention: each row of weights sums to one. With the mask a token sees only itself and the past.
export function attentionWeights(q, k, causal) {
  const root = Math.sqrt(q[0].length);
  return products(q, k).map((row, i) => {
    const scores = row.map((s, j) => (causal && j > i ? -Infinity : s / root));
    const top = Math.max(...scores); // taken off first: exp of a large number overflows
    const parts = scores.map(s => Math.exp(s - top));
    const sum = parts.reduce((a, b) => a + b);
    return parts.map(p => p / sum);
  });
}

// The four terms whose sum is q'_i . k'_j after one Euler step.
export function scoreTerms(q, k, f, dt) {
  const forces = q.map(f);
  const times = (s, rows) => rows.map(row => row.map(x => s * x));
  return {
    "query-key": products(q, k),
    "key-key": times(dt, products(k, k)),
    "query-force": times(dt, products(q, forces)),
    "key-force": times(dt ** 2, products(k, forces)),
  };
}

// |after - before| / |before|, over all entries.
export function displacement(before, after) {
  const a = before.flat(), moved = plus(after.flat(), -1, a);
  return Math.sqrt(dot(moved, moved)) && Math.sqrt(dot(moved, moved) / dot(a, a));
}

function determinant(rows) { // Gauss, with the largest pivot
  const M = rows.map(row => [...row]);
  let det = 1;
  for (let c = 0; c < M.length; c++) {
    const p = M.reduce((best, row, r) => (r >= c && Math.abs(row[c]) > Math.abs(M[best][c]) ? r : best), c);
    if (M[p][c] === 0) return 0;
    if (p !== c) [M[p], M[c], det] = [M[c], M[p], -det];
    det *= M[c][c];
    for (let r = c + 1; r < M.length; r++) M[r] = plus(M[r], -M[r][c] / M[c][c], M[c]);
  }
  return det;
}

// By what factor one step makes a small volume around (q, k) grow: the determinant of its Jacobian, by central differences.
function growth(step, q, k, f, dt, eps = 1e-4) {
  const z = [...q, ...k];
  const nudged = (i, e) => z.map((x, j) => x + (i === j ? e : 0));
  const end = z => step(z.slice(0, q.length), z.slice(q.length), f, dt).flat();
  return determinant(z.map((_, i) => plus(end(nudged(i, eps)), -1, end(nudged(i, -eps))).map(x => x / (2 * eps)))); // of J, transposed
}

// The same for n steps: a product, by the chain rule. So the differences stay good where a path runs far.
export function volume(step, q, k, f, dt, n) {
  return trail(step, q, k, f, dt, n).slice(0, n).reduce((product, [q, k]) => product * growth(step, q, k, f, dt), 1);
}
