-- Delete a consumer that has nothing: with it, its entries would be lost to the group.
-- KEYS: stream. ARGV: group, consumer.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
