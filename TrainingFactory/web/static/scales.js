// Ranges, grids and widths of the axes of charts.

/** Makes the axis as wide as its longest number. */
export function wide(_, values) {
  return 14 + Math.max(1, ...(values ?? []).map((text) => text.length)) * 6.5;
}

/** Replaces values that a logarithmic scale cannot show by null. */
export function positive(values) {
  return values.map((value) => (value > 0 ? value : null));
}

/** Keeps the lines of a logarithmic grid at 1, 10, 100 where it has many. */
export function powers(_, splits) {
  const whole = (value) => value > 0 && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
  return splits.filter(whole).length > 1 ? splits.map((value) => (whole(value) ? value : null)) : splits;
}

export function spread(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const flat = high - low <= size * 1e-9; // rounding is no curve
  const room = flat ? size * 0.1 || 1 : (high - low) * 0.08;
  return [low - room, high + room]; // below zero, too: a curve on the frame looks like no curve
}

export function shareRange(_, low, high) {
  return [Math.min(0, low ?? 0) - 0.05, Math.max(1, high ?? 1) + 0.05];
}
