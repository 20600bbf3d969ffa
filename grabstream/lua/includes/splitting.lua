-- The laws by which an envelope's total is split into parts, one part at a time: the same arithmetic as
-- models/splitting.py; golden vectors test both. All numbers stay below 2^53, so every step is exact in
-- doubles. The helpers of these functions are local to the block, because a script may have at most 200
-- locals.

local next_part
do
  local DRAW_RANGE = 4503599627370496 -- 16^13

  -- Draw k of a seed, uniform on 0 … range_size-1: 13 hex digits of SHA-1(seed:k:attempt), with rejection.
  local function draw(seed, k, range_size)
    local limit = DRAW_RANGE - DRAW_RANGE % range_size
    local attempt = 0
    while true do
      local digest = redis.sha1hex(string.format('%s:%d:%d', seed, k, attempt))
      local number = tonumber(string.sub(digest, 1, 13), 16)
      if number < limit then return number % range_size end
      attempt = attempt + 1
    end
  end

  -- The maximum difference of a part from the mean of the rest, so that all later parts stay legal.
  local function half_width(law, left, parts, least, most)
    if law == 'equal' then return 0 end
    local rest = left % parts
    local mean = (left - rest) / parts
    if law == 'double_mean' then return mean - least end
    local lowest = math.max(least, left - (parts - 1) * most)
    local highest = math.min(most, left - (parts - 1) * least)
    return math.min(mean - lowest, highest - mean - (rest > 0 and 1 or 0))
  end

  -- The part at place k, when `left` minor units remain for `parts` parts; the last part takes the rest.
  function next_part(law, left, parts, least, most, seed, k)
    if parts == 1 then return left end
    local rest = left % parts
    local mean = (left - rest) / parts
    local width = half_width(law, left, parts, least, most)
    local number = draw(seed, k, (2 * width + 1) * parts)
    local extra = number % parts
    return mean - width + (number - extra) / parts + (extra < rest and 1 or 0)
  end
end
