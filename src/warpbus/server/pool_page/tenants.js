// Each tenant has a colour, the same wherever it appears, for as long as the page is open.

const COLOURS = 8;
const given = new Map();

/** The class of a tenant's colour. Names come in an order that does not change from one status to the next. */
export function colourOf(tenant) {
  if (!given.has(tenant)) given.set(tenant, given.size % COLOURS);
  return `tenant-${given.get(tenant)}`;
}

export function meet(leases) {
  for (const tenant of leases.map((lease) => lease.tenant).sort()) colourOf(tenant);
}
